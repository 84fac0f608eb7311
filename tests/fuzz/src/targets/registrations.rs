//! The log of registered datasets in a server's state directory.

use crate::{plant, repair};
use fletch_core::record;
use fletch_server::fuzzing;

pub fn seeds() -> Vec<Vec<u8>> {
    let mut log = record::file_header().to_vec();
    let dataset = |name: &str| {
        format!(
            r#"{{"domain":"d","tenant":"t","name":"{name}","uri":"/data","tables":"/t","registered_ns":7}}"#
        )
    };
    record::append(&mut log, 1, dataset("images").as_bytes());
    record::append(&mut log, 1, dataset("audio").as_bytes());
    record::append(&mut log, 3, br#"{"domain":"d","name":"audio","bytes":99}"#);
    record::append(&mut log, 2, br#"{"domain":"d","name":"images"}"#);
    vec![log]
}

/// The valid prefix alone gives the same registrations.
pub fn run(input: &[u8]) -> bool {
    let file = repair::log(input);
    let Ok((found, len)) = fuzzing::registrations(&file) else { return false };
    assert!(len <= file.len());
    assert_eq!(fuzzing::registrations(&file[..len]), Ok((found.clone(), len)));
    plant::bug(found.len() == 1 && found.iter().any(|r| !r.contains("audio")));
    true
}
