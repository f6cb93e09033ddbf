# SPDX-License-Identifier: Apache-2.0
import pytest

pytest_plugins = ["pytester"]


@pytest.mark.parametrize(
    ("source", "outcome"),
    [
        ("import pytest\ndef test(): pytest.skip('no GPU')", "failed"),
        ("import pytest\npytest.skip('no GPU', allow_module_level=True)", "errors"),
    ],
)
def test_a_skip_is_a_failure(pytester, source, outcome):
    pytester.makepyfile(source)
    result = pytester.runpytest_inprocess("-p", "kernelkit.no_skips")
    result.assert_outcomes(**{outcome: 1})
    result.stdout.fnmatch_lines(["*a skip is a failure here: *no GPU*"])
