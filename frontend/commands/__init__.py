"""One module a subcommand of ``outrider``; each has ``main(args) -> exit status``."""
