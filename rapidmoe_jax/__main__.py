"""python -m rapidmoe_jax: the same as the command rapidmoe."""

from rapidmoe_jax.cli import main

raise SystemExit(main())
