"""`python -m nereus_verl.demo`."""

from nereus_verl.demo import main

raise SystemExit(main())
