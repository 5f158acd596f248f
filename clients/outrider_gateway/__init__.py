"""An OpenAI-compatible HTTP server in front of target services: `python -m outrider_gateway`, or `outrider gateway`.

It is a client of the gRPC contract like any other, through `outrider_client`: it holds no model and no tokenizer that
an answer depends on, and can be started, stopped and multiplied without a target noticing.
"""
