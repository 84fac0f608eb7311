//! The JSON documents of a version: manifest, layout, tag.

use super::golden_bytes;
use crate::plant;
use fletch_core::{
    Hash,
    manifest::{layout::layout_id, root},
};
use fletch_tables::{LayoutDoc, Manifest, TagDoc};

pub fn seeds() -> Vec<Vec<u8>> {
    ["tables/manifest.json", "tables/layout.json", "tag.json"].map(golden_bytes).to_vec()
}

/// Reads the input as each document, with the identity that its content has. What was read is written and
/// read again.
pub fn run(input: &[u8]) -> bool {
    let manifest = serde_json::from_slice::<Manifest>(input).is_ok_and(|mut m| {
        let hashes: Vec<Hash> = m.parts.iter().map(|p| p.hash).collect();
        m.root = root(&m.sample_rule, &hashes);
        let written = m.to_bytes().expect("a document");
        let Ok(read) = Manifest::parse(&written, m.root) else { return false };
        assert_eq!(read, m);
        plant::bug(m.samples != 7);
        true
    });
    let layout = serde_json::from_slice::<LayoutDoc>(input).is_ok_and(|mut l| {
        l.layout = layout_id(&l.params, l.root, &l.parts);
        let written = l.to_bytes().expect("a document");
        let Ok(read) = LayoutDoc::parse_any(&written) else { return false };
        assert_eq!(read, l);
        assert!(l.params.check().is_ok() && l.params.slice_lengths(1 << 20).take(9).all(|n| n > 0));
        plant::bug(l.minor > 9);
        true
    });
    let tag = TagDoc::parse(input).is_ok_and(|tag| {
        assert_eq!(TagDoc::parse(&tag.to_bytes().expect("a document")).as_ref(), Ok(&tag));
        plant::bug(tag.minor > 9);
        true
    });
    let _ = (Manifest::parse(input, fletch_core::Root(Hash::of(input))), LayoutDoc::parse_any(input));
    manifest || layout || tag
}
