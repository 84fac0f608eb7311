#!/bin/sh
# Prints eight Jobs that train one dataset with eight learning rates.
#
#   sh sweep.sh IMAGE DATASET [SERVER] | kubectl apply -f -
#
# Each pod is a job of its own to the server, under the name that `fletch jobs` shows. A pod that starts again
# trains from the beginning. docs/howto/train-from-python.md shows how to continue from a checkpoint.
set -eu
if [ $# -lt 2 ]; then
    echo "usage: sweep.sh IMAGE DATASET [SERVER]" >&2
    exit 2
fi
image=$1
dataset=$2
server=${3:-http://fletch.fletch.svc.cluster.local:7380}

number=0
for rate in 0.0001 0.0003 0.001 0.002 0.003 0.005 0.01 0.03; do
    cat <<JOB
---
apiVersion: batch/v1
kind: Job
metadata:
  name: sweep-$number
  labels: {sweep: learning-rate}
spec:
  backoffLimit: 3
  template:
    metadata:
      labels: {sweep: learning-rate}
    spec:
      restartPolicy: Never
      automountServiceAccountToken: false
      securityContext:
        runAsNonRoot: true
        runAsUser: 1000
        runAsGroup: 1000
        fsGroup: 1000
        seccompProfile: {type: RuntimeDefault}
      tolerations:
        - {key: nvidia.com/gpu, operator: Exists, effect: NoSchedule}
      containers:
        - name: train
          image: $image
          command: [python3, /etc/train/sweep-train.py]
          env:
            - {name: SERVER, value: "$server"}
            - {name: TOKEN_FILE, value: /etc/fletch/token}
            - {name: DATASET, value: "$dataset"}
            - {name: JOB, valueFrom: {fieldRef: {fieldPath: metadata.name}}}
            - {name: RATE, value: "$rate"}
            - {name: EPOCHS, value: "3"}
            - {name: WORKERS, value: "4"}
          securityContext:
            allowPrivilegeEscalation: false
            readOnlyRootFilesystem: true
            capabilities: {drop: [ALL]}
          resources:
            requests: {cpu: "4", memory: 8Gi}
            limits: {memory: 16Gi, nvidia.com/gpu: 1}
          volumeMounts:
            - {name: train, mountPath: /etc/train, readOnly: true}
            - {name: token, mountPath: /etc/fletch, readOnly: true}
            - {name: tmp, mountPath: /tmp}
            - {name: shm, mountPath: /dev/shm}
      volumes:
        - name: train
          configMap: {name: fletch-sweep}
        - name: token
          secret: {secretName: fletch-token, defaultMode: 0440}
        - name: tmp
          emptyDir: {}
        - name: shm
          emptyDir: {medium: Memory, sizeLimit: 4Gi}
JOB
    number=$((number + 1))
done
