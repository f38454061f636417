import sys

from sam.verify.bench import main

sys.exit(main())
