"""Reports of measurements: results as a JSON file, and the Markdown and the picture made from this file only.

This package has tables, pictures, the machine, verdicts on targets, and their records. It does not measure.
"""

from typing import Any

Results = dict[str, Any]
"""Results, of JSON types."""
