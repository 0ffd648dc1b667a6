"""Where the tree is, and what tests keep in it."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TESTS = ROOT / "tests"
SUPPORT = TESTS / "support"
GOLDEN = TESTS / "golden"
DOCS = ROOT / "docs"
COURSE = DOCS / "course"
JOBS = ROOT / "jobs"


def files_of_tests(pattern: str = "*") -> list[Path]:
    """Return the files test_`pattern`.py of every room, by name."""
    return sorted(TESTS.rglob(f"test_{pattern}.py"), key=lambda path: path.name)
