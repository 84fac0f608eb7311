//! The records of declared jobs in a server's state directory.

use crate::plant;
use fletch_server::fuzzing;

pub fn seeds() -> Vec<Vec<u8>> {
    let hash = "92a2b787a06d7272df43eaf87acc3b9c1d315d79d599d61c285983483e431998";
    let with = |ask: &str| {
        format!(
            r#"{{"domain":"d","tenant":"t","ask":{{"name":"train",
            "world":{{"ranks":2,"batch":8,"tail":"drop"}}{ask}}},
            "dataset":"images","root":"{hash}","layout":"{hash}"}}"#
        )
        .into_bytes()
    };
    vec![
        with(""),
        with(r#","plan":{"base":{"keys":["a","b"]},"echo":{"copies":2,"apart":3}},"seed":5"#),
        with(r#","plan":{"base":{"weights":{"weights":[1,null,0.5],"draws":3}}},"order":"strict""#),
        with(r#","buckets":{"lengths":[10]},"order":"bucketed","visitation":"checkpoint""#),
        with(r#","replay":{"ledger":"bGVk/w=="},"order":"replay""#),
    ]
}

/// What the server writes, it reads as the same record.
pub fn run(input: &[u8]) -> bool {
    let Ok(written) = fuzzing::job_record(input) else { return false };
    assert_eq!(fuzzing::job_record(&written).as_ref(), Ok(&written));
    let text = String::from_utf8_lossy(&written);
    plant::bug(!text.contains("\"ranks\":2"));
    true
}
