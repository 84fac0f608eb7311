//! A batch: many pieces of one version in one request, each with its own outcome.
//!
//! The answer is a stream of [`crate::frames`], or a tar archive when the client says
//! `Accept: application/x-tar`. Items come in the request's order.

use fletch_core::Hash;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// No batch asks for more pieces.
pub const BATCH_ITEMS_MAX: usize = 4096;

/// Body of `POST /v1/versions/{root}/batch`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct BatchRequest {
    /// 1 to [`BATCH_ITEMS_MAX`] pieces.
    pub items: Vec<BatchItem>,
}

/// One piece: `{"path": "train/a.jpg"}`, `{"ordinal": 17}` or `{"chunk": {"hash": "…"}}`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum BatchItem {
    /// A whole file, by its path.
    Path(String),
    /// A whole file, by its entry's ordinal.
    Ordinal(u64),
    /// A range of a chunk.
    Chunk(ChunkSpan),
}

/// Bytes `offset .. offset + length` of a chunk; the whole chunk without them.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ChunkSpan {
    /// Which chunk.
    #[schema(value_type = String)]
    pub hash: Hash,
    /// First byte.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub offset: u64,
    /// Number of bytes; to the chunk's end when absent. A span past the end is an error.
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
    fn items_read_as_documented() {
        let h = Hash::of(b"");
        let text = format!(
            r#"{{"items":[{{"path":"a/b"}},{{"ordinal":17}},{{"chunk":{{"hash":"{h}"}}}},{{"chunk":{{"hash":"{h}","offset":3,"length":4}}}}]}}"#
        );
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
