"""Programs that use the library, each to be run from a checkout.

demo                         two processes, real rollout lengths, every cell compared: `make demo`
zmq_pipeline                 many producers and a trainer, over ZeroMQ
torch_distributed_broadcast  a leader and its peers
ray_store                    through Ray's object store
mooncake_put_get             through a Mooncake store
verl_dataproto               verl's `DataProto` through Ray
transfer_queue_put_get       through TransferQueue
"""
