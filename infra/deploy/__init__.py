"""Files that start a Ray cluster for goodviews: Kubernetes (`kuberay.yaml`) and plain machines (`ray-up.yaml`).

A job runs there by the same command as on one machine, with a shared HOME, a Postgres catalog and `--address auto`.
Invariant: Ray's token authentication is on in every file.

Checked: that the files parse, name the pinned Ray and keep the token (tests/infra/deploy/test_deploy.py); joining and
using a token-guarded Ray from another process. Not tried: these files on a real cluster. Ray's token is sent in the
clear, so keep the cluster in a private network.
"""
