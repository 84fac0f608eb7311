//! JSON bodies of the API: those that clients send, and those that clients read.

use super::golden_json;
use crate::plant;
use fletch_api::{
    Accounts, Acked, Acks, BatchRequest, Checkpoint, Cluster, Datasets, EpochReceipt, Info, Job, JobList,
    LeaseGrant, LeaseRequest, Problem, RegisterDataset, ResolvedVersion, Rollback, SampleHead, SampleRef,
    StartJob, StartWarmup, Warmup, Warmups, WorldSpec, node::NodeState,
};
use fletch_core::{
    delivery::receipt::{LtHash, Receipt},
    plan::Bits,
};
use serde::{Serialize, de::DeserializeOwned};

/// The bodies. The first byte of an input says which.
const BODIES: &[fn(&[u8]) -> bool] = &[
    round::<StartJob>,
    round::<LeaseRequest>,
    round::<Acks>,
    round::<BatchRequest>,
    round::<RegisterDataset>,
    round::<StartWarmup>,
    round::<Checkpoint>,
    round::<Rollback>,
    round::<WorldSpec>,
    round::<LeaseGrant>,
    round::<SampleHead>,
    round::<SampleRef>,
    round::<Acked>,
    round::<Problem>,
    round::<Job>,
    round::<JobList>,
    round::<Warmup>,
    round::<Warmups>,
    round::<Datasets>,
    round::<ResolvedVersion>,
    round::<Accounts>,
    round::<Cluster>,
    round::<Info>,
    round::<NodeState>,
    round::<EpochReceipt>,
    round::<Receipt>,
    bitmap,
    sum,
];

pub fn seeds() -> Vec<Vec<u8>> {
    let hash = "92a2b787a06d7272df43eaf87acc3b9c1d315d79d599d61c285983483e431998";
    let texts = [
        (
            0,
            r#"{"name":"t","dataset":"d","plan":{"base":{"keys":["a"]},"echo":{"copies":2}},
            "world":{"ranks":2,"batch":8,"tail":"drop"}}"#
                .to_owned(),
        ),
        (
            0,
            r#"{"name":"t","dataset":"d","plan":{"base":{"weights":{"weights":[1,null,0.5],"draws":3}}},
            "order":"strict","world":{"ranks":1,"batch":1,"tail":"keep"}}"#
                .to_owned(),
        ),
        (0, r#"{"name":"t","world":{"ranks":1,"batch":8,"tail":"drop"}}"#.to_owned()),
        (
            1,
            r#"{"rank":1,"sequence":3,"want":64,"acks":[{"lease":9,"upto":3,"batches":[{"entries":3}]}],
            "renew":[10]}"#
                .to_owned(),
        ),
        (2, r#"{"rank":0,"acks":[{"lease":1,"upto":2}],"renew":[3]}"#.to_owned()),
        (
            3,
            format!(
                r#"{{"items":[{{"path":"a"}},{{"ordinal":7}},{{"chunk":{{"hash":"{hash}","length":4}}}}]}}"#
            ),
        ),
        (4, r#"{"name":"d","uri":"/data","tables":"/t"}"#.to_owned()),
        (5, r#"{"dataset":"d","version":"latest","check":true,"pin_s":60}"#.to_owned()),
        (6, r#"{"commit":5}"#.to_owned()),
        (9, r#"{"status":"granted","lease":7,"entries":[3,4],"ttl_ms":9,"left":2}"#.to_owned()),
        (
            10,
            format!(
                r#"{{"entry":1,"sample":1,"ordinal":1,"copy":0,"files":[{{"path":"a","size":3,
            "hash":"{hash}"}}]}}"#
            ),
        ),
        (
            11,
            format!(r#"{{"pieces":[{{"chunk":"{hash}","chunk_len":9,"offset":1,"len":2}}],"owner":"a:1"}}"#),
        ),
        (
            13,
            r#"{"type":"urn:x","title":"t","status":404,"detail":"d","code":"not_found","retryable":false}"#
                .to_owned(),
        ),
        (25, golden_json("epochs/receipt.json")["receipt"].to_string()),
        (26, "\u{9}ab".to_owned()),
    ];
    texts.into_iter().map(|(which, text)| [&[which], text.as_bytes()].concat()).collect()
}

/// What was read is written and read again as the same value.
pub fn run(input: &[u8]) -> bool {
    let Some((&which, body)) = input.split_first() else { return false };
    if let Ok(job) = serde_json::from_slice::<StartJob>(body) {
        plant::bug(job.world.batch == 9);
    }
    BODIES[usize::from(which) % BODIES.len()](body)
}

fn round<T: DeserializeOwned + Serialize + PartialEq>(body: &[u8]) -> bool {
    let Ok(value) = serde_json::from_slice::<T>(body) else { return false };
    let written = serde_json::to_vec(&value).expect("a value that was read can be written");
    let read: T = serde_json::from_slice(&written).unwrap_or_else(|e| {
        panic!("what was written cannot be read: {e}: {}", String::from_utf8_lossy(&written))
    });
    assert!(read == value, "another value was read: {}", String::from_utf8_lossy(&written));
    true
}

/// The bitmap of an epoch's state, of as many bits as its first byte says.
fn bitmap(body: &[u8]) -> bool {
    let Some((&len, bytes)) = body.split_first() else { return false };
    let Some(bits) = Bits::from_bytes(u64::from(len), bytes) else { return false };
    assert_eq!(bits.to_bytes(), bytes);
    assert_eq!(bits.count(), (0..bits.len()).filter(|&i| bits.get(i)).count() as u64);
    true
}

/// The sum of a receipt.
fn sum(body: &[u8]) -> bool {
    LtHash::from_bytes(body).is_some_and(|sum| {
        assert_eq!(sum.to_bytes(), body);
        true
    })
}
