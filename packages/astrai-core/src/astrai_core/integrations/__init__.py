# SPDX-License-Identifier: Apache-2.0
"""What connects astrai_core to other libraries: one module each, imported only by its users."""
