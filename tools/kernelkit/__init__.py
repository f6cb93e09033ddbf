# SPDX-License-Identifier: Apache-2.0
"""What tests and benchmarks of kernels share."""
