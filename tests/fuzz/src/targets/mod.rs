//! The targets, one file for each parser or for a few small ones.

pub mod bodies;
pub mod case;
pub mod consumption;
pub mod documents;
pub mod frames;
pub mod hits;
pub mod journal;
pub mod ledger;
pub mod log;
pub mod origin;
pub mod record;
pub mod registrations;
pub mod requests;
pub mod s3;
pub mod selection;
pub mod settings;
pub mod slab;
pub mod tables;
pub mod tar;
pub mod text;
pub mod trace;

use std::path::PathBuf;

/// Returns the path of a golden file.
fn golden(name: &str) -> PathBuf {
    PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../golden")).join(name)
}

/// Returns the bytes of a golden file.
fn golden_bytes(name: &str) -> Vec<u8> {
    let path = golden(name);
    std::fs::read(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

/// Returns a golden file in JSON.
fn golden_json(name: &str) -> serde_json::Value {
    serde_json::from_slice(&golden_bytes(name)).unwrap_or_else(|e| panic!("{name}: {e}"))
}

/// Returns the bytes that a golden file in JSON writes in hex.
fn unhex(value: &serde_json::Value) -> Vec<u8> {
    let digits = value.as_str().unwrap_or_default().as_bytes();
    let digit = |d: &u8| char::from(*d).to_digit(16).and_then(|d| u8::try_from(d).ok()).unwrap_or(0);
    digits.chunks_exact(2).map(|pair| digit(&pair[0]) << 4 | digit(&pair[1])).collect()
}
