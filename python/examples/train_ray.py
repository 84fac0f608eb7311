"""Trains on several workers of Ray Train, and continues where they were after a restart.

    python train_ray.py SERVER DATASET JOB

The checkpoint is JOB.checkpoint in the folder of the start, which all workers see. Rank 0 writes it.
"""

import os, pickle, sys

import ray.train
from ray.train.collective import barrier
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

import fletch

EPOCHS, STEPS_PER_CHECKPOINT = 2, 4


def train(config):
    context = ray.train.get_context()
    rank, ranks = context.get_world_rank(), context.get_world_size()
    checkpoint = os.path.join(config["folder"], f"{config['job']}.checkpoint")
    saved = {"bytes": 0, "data": None}
    if os.path.exists(checkpoint):
        with open(checkpoint, "rb") as file:
            saved = pickle.load(file)
    # One job name for all workers: together they read each sample once.
    client = fletch.Client(config["server"], job=config["job"])
    settings = {"job": config["job"], "batch_size": 2, "rank": rank, "ranks": ranks}
    if rank > 0:
        barrier()  # Rank 0 has loaded its state.
    epochs = fletch.Epochs(client, config["dataset"], state=saved["data"], **settings)
    if rank == 0:
        barrier()
    read = saved["bytes"]

    def save():
        """Saves everything. All ranks call it at the same step."""
        epochs.state_dict()
        barrier()  # The server knows what every rank consumed, so the state of rank 0 has it all.
        if rank == 0:
            with open(f"{checkpoint}.new", "wb") as file:
                pickle.dump({"bytes": read, "data": epochs.state_dict()}, file)
            os.replace(f"{checkpoint}.new", checkpoint)
        barrier()

    if saved["data"]:
        print(f"continues with epoch {epochs.next_epoch}", flush=True)
    else:
        save()
    with epochs:
        for epoch in range(epochs.next_epoch, EPOCHS):
            for number, batch in enumerate(epochs.epoch(epoch), 1):
                read += sum(sample.nbytes for sample in batch)
                if number % STEPS_PER_CHECKPOINT == 0:
                    save()
                    print(f"checkpoint after {number} steps of this run", flush=True)
            print(f"epoch {epoch}: {epochs.stats()['samples']} images of rank {rank}", flush=True)
        save()


server, dataset, job = sys.argv[1:4]
config = {"server": server, "dataset": dataset, "job": job, "folder": os.getcwd()}
ray.init(num_cpus=2, include_dashboard=False, log_to_driver=True)
scaling = ray.train.ScalingConfig(num_workers=2, resources_per_worker={"CPU": 1})
DataParallelTrainer(train, train_loop_config=config, scaling_config=scaling).fit()
