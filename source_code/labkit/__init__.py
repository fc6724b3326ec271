"""labkit: what the labs share and no chapter is about. Each file has one job; see its first line."""


class UserError(Exception):
    """Something the user can put right. Its text is one sentence: what is wrong, and what to do.

    Every command of the course prints that sentence alone, without a traceback, and exits with code 2.
    """
