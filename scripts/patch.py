#!/usr/bin/env python3
"""python scripts/patch.py {status,check,apply,revert}: the patches of vllm-ascend, all or nothing."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from sam_recipe.launch.versions import main  # noqa: E402

sys.exit(main())
