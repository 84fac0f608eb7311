"""Trains with Hugging Face's Trainer, evaluates after each epoch, and continues after a restart.

    python train_hugging_face.py SERVER DATASET JOB

Under `torchrun` every rank trains its share. Each sub-folder of the dataset is one class. The checkpoints are
in the folder JOB.
"""

import io, sys

import torch
from PIL import Image
from torchvision.transforms import Compose, Resize, ToTensor
from transformers import TrainerCallback, TrainingArguments

import fletch
from fletch.torch import EpochDataset, EvalDataset, ImageFolder
from fletch.torch.hugging_face import EpochTrainer

server, dataset, job = sys.argv[1:4]
client = fletch.Client(server, job=job)
classes = ImageFolder(client.resolve(dataset)).class_to_idx
shrink = Compose([Resize((24, 24)), ToTensor()])


def decode(sample):
    image = Image.open(io.BytesIO(sample.content)).convert("RGB")
    return {"pixels": shrink(image), "labels": classes[sample.path.split("/")[0]]}


class Classifier(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * 24 * 24, len(classes)))

    def forward(self, pixels, labels):
        logits = self.net(pixels)
        return {"loss": torch.nn.functional.cross_entropy(logits, labels), "logits": logits}


class Report(TrainerCallback):
    def on_save(self, args, state, control, **more):
        print(f"checkpoint after {state.global_step} steps", flush=True)


def measure(predicted):
    print(f"evaluated {len(predicted.label_ids)} images", flush=True)
    return {"accuracy": float((predicted.predictions.argmax(-1) == predicted.label_ids).mean())}


args = TrainingArguments(
    job, num_train_epochs=2, per_device_train_batch_size=4, per_device_eval_batch_size=8, use_cpu=True,
    save_strategy="steps", save_steps=5, eval_strategy="epoch", dataloader_num_workers=2, report_to=[],
)
# After the arguments, which make the process group: now the dataset knows its rank.
train = EpochDataset(client, dataset, job=job, batch_size=4, transform=decode)
# Trainer divides the evaluation among the ranks, so each rank names the whole pass.
val = EvalDataset(client, dataset, transform=decode, rank=0, ranks=1)
trainer = EpochTrainer(
    Classifier(), args, train_dataset=train, eval_dataset=val, compute_metrics=measure, callbacks=[Report()]
)
trainer.train(resume_from_checkpoint=True)  # The first time there is no checkpoint, and it begins.

train.state_dict()  # Trainer asks for no batch after the last one: acknowledge that one.
stats = train.stats()
print(f"epoch {stats['epoch']}: {stats['samples']} images, receipt {stats['receipt']}", flush=True)
