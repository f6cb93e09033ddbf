# SPDX-License-Identifier: Apache-2.0
"""Grades a solution of a task: standard library and torch only, part of every bundle."""
