"""The torch side: worker, model runner, models, KV pools, drafters, verify and sampling."""
