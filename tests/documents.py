"""The documents of the project, and the code blocks in them."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
DOCUMENTS = [README, *sorted((ROOT / "docs").glob("*.md"))]


def blocks(path, language):
    text = path.read_text(encoding="utf-8")
    return re.findall(r"^```{}\n(.*?)^```".format(language), text, flags=re.MULTILINE | re.DOTALL)
