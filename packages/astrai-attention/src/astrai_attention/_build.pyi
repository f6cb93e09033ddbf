# SPDX-License-Identifier: Apache-2.0
CUDA: str | None
SASS: tuple[str, ...]
PTX: tuple[str, ...]
