"""The strict core: config, messages, requests, scheduler, commit. Imports no torch."""
