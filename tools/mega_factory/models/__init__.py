# SPDX-License-Identifier: Apache-2.0
"""References of the tasks: each module is self-contained, and becomes a bundle's reference.py."""
