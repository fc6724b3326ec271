// The theme's style sheet has the icons. Its script of 1.6 MB, which this file replaces, would draw them again.
