"""What tests of more than one folder use; one copy of each."""

from pathlib import Path

ROOT = Path(__file__).parent.parent
