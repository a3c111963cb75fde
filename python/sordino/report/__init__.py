"""What is made of measurements: results as a JSON file, and the Markdown and the picture that come from it alone.

Tables, pictures, the machine, verdicts on targets, and the records of them all; nothing of what is measured, or how.
"""

from typing import Any

Results = dict[str, Any]
"""What was found, of JSON's types."""
