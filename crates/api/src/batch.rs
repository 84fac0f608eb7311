//! Batches: many pieces of one version in one request, each with its own outcome.
//!
//! The answer is a stream of [`crate::frames`], or a tar archive if the request has `Accept:
//! application/x-tar`. Items come in the order of the request.

use fletch_core::Hash;
use serde::{
    Deserialize, Deserializer, Serialize,
    de::{Error as _, SeqAccess, Visitor},
};
use std::fmt;
use utoipa::ToSchema;

/// The most pieces in a batch.
pub const BATCH_ITEMS_MAX: usize = 4096;

/// Body of `POST /v1/versions/{root}/batch`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct BatchRequest {
    /// The pieces to return: 1 to 4,096.
    #[serde(deserialize_with = "bounded_items")]
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

/// Reads at most [`BATCH_ITEMS_MAX`] pieces, so that a longer list takes no memory.
fn bounded_items<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<BatchItem>, D::Error> {
    struct Items;

    impl<'de> Visitor<'de> for Items {
        type Value = Vec<BatchItem>;

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            write!(f, "1 to {BATCH_ITEMS_MAX} items")
        }

        fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Self::Value, A::Error> {
            let mut items = Vec::new();
            while let Some(item) = seq.next_element()? {
                if items.len() == BATCH_ITEMS_MAX {
                    let what = format!("the batch has too many items; send 1 to {BATCH_ITEMS_MAX}");
                    return Err(A::Error::custom(what));
                }
                items.push(item);
            }
            Ok(items)
        }
    }

    deserializer.deserialize_seq(Items)
}

fn is_zero(n: &u64) -> bool {
    *n == 0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_batch_of_too_many_items_is_not_read_to_its_end() {
        let of = |n: usize| format!("{{\"items\":[{}]}}", vec!["{\"ordinal\":1}"; n].join(","));
        let most: BatchRequest = serde_json::from_str(&of(BATCH_ITEMS_MAX)).expect("as many as allowed");
        assert_eq!(most.items.len(), BATCH_ITEMS_MAX);
        let more = of(BATCH_ITEMS_MAX + 1) + "what follows is not read";
        let told = serde_json::from_str::<BatchRequest>(&more).expect_err("one too many").to_string();
        assert!(told.contains("send 1 to 4096"), "{told}");
    }

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
