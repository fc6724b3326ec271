# SPDX-License-Identifier: BSD-3-Clause
"""Commands that prove what the project claims: each file is one, run from source_code/ as ``python -m proofs.NAME``."""
