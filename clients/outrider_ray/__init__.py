"""Outrider as an application of Ray Serve: targets, drafts and gateways as deployments of one application.

Ray places, scales and restarts the replicas. A replica of a target or a draft starts the service as a process of its
own and looks after it; a gateway's replica is the gateway's application behind Serve's proxies. The services know
nothing of Ray.

    serve deploy fleet.yaml        # import_path: outrider_ray.application:fleet

`outrider_ray.weights.update_weights` needs no Ray, only the address of its dashboard.
"""
