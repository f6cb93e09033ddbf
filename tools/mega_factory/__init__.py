# SPDX-License-Identifier: Apache-2.0
"""Specifies, renders, grades and verifies tasks: write a whole-model decode megakernel."""
