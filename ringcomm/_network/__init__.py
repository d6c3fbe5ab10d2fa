"""The network as a job knows it: costs of messages, order of the hosts, and probes."""
