import sys

from recipe.preflight.report import main

sys.exit(main())
