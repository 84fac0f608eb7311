//! Batches: many pieces of one version in one request, each with its own outcome.
//!
//! The answer is a stream of [`crate::frames`], or a tar archive if the request has `Accept:
//! application/x-tar`. Items come in the order of the request.

use fletch_core::Hash;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// The most pieces in a batch.
pub const BATCH_ITEMS_MAX: usize = 4096;

/// Body of `POST /v1/versions/{root}/batch`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct BatchRequest {
    /// The pieces to return: 1 to 4,096.
    pub items: Vec<BatchItem>,
}

/// One piece of a version: `{"path": "train/a.jpg"}`, `{"ordinal": 17}` or `{"chunk": {"hash": "…"}}`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum BatchItem {
    /// A whole file, by its path in the version.
    Path(String),
    /// A whole file, by the ordinal of its entry.
    Ordinal(u64),
    /// A range of a chunk.
    Chunk(ChunkSpan),
}

/// The bytes `offset .. offset + length` of a chunk. Without both fields, the whole chunk.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ChunkSpan {
    /// The BLAKE3 hash of the chunk.
    #[schema(value_type = String)]
    pub hash: Hash,
    /// The offset of the first byte.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub offset: u64,
    /// The number of bytes.
    ///
    /// Without it, all bytes up to the end of the chunk. A span past the end is an error.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub length: Option<u64>,
}

fn is_zero(n: &u64) -> bool {
    *n == 0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn items_parse_as_documented() {
        let h = Hash::of(b"");
        let text = concat!(
            r#"{"items":[{"path":"a/b"},{"ordinal":17},{"chunk":{"hash":"HASH"}},"#,
            r#"{"chunk":{"hash":"HASH","offset":3,"length":4}}]}"#
        );
        let text = text.replace("HASH", &h.to_string());
        let req: BatchRequest = serde_json::from_str(&text).expect("documented form");
        let span = |offset, length| BatchItem::Chunk(ChunkSpan { hash: h, offset, length });
        assert_eq!(
            req.items,
            [BatchItem::Path("a/b".into()), BatchItem::Ordinal(17), span(0, None), span(3, Some(4))]
        );
        assert_eq!(serde_json::to_string(&req).expect("json"), text);
        assert!(serde_json::from_str::<BatchRequest>(r#"{"items":[{"inode":1}]}"#).is_err());
    }
}
