//! A batch as a tar archive.
//!
//! An item that fails before its header is sent is left out, and listed in the last member ([`PROBLEMS`]). An
//! item that fails later cuts the connection.

use crate::http::{
    error::ApiError,
    frames::{Content, Item},
    response_body::{BodyError, Piece},
};
use bytes::Bytes;
use fletch_api::{Code, Problem};
use futures::{Stream, StreamExt as _, stream, stream::BoxStream};
use parking_lot::Mutex;
use serde::Serialize;
use std::sync::Arc;

/// The member that lists the items that are missing.
const PROBLEMS: &str = "fletch-problems.json";
const BLOCK: u64 = 512;
/// Two zero blocks end an archive.
const END: [u8; 1024] = [0; 1024];

#[derive(Serialize)]
struct MissingItem {
    index: u32,
    problem: Box<Problem>,
}

/// Returns the archive of the items, in order.
pub(super) fn archive(
    items: impl Stream<Item = Item> + Send + 'static,
) -> impl Stream<Item = Result<Piece, BodyError>> + Send + 'static {
    let missing = Arc::new(Mutex::new(Vec::<MissingItem>::new()));
    let to_fill = Arc::clone(&missing);
    let members = items.map(move |item| member(item, &to_fill)).flatten();
    let end = stream::once(async move {
        let missing = std::mem::take(&mut *missing.lock());
        Ok(Piece::Framing(archive_end(&missing)?.into()))
    });
    members.chain(end)
}

fn member(item: Item, missing: &Mutex<Vec<MissingItem>>) -> BoxStream<'static, Result<Piece, BodyError>> {
    let Item { index, name, result, reservation } = item;
    let leave_out = |problem: Box<Problem>| {
        missing.lock().push(MissingItem { index, problem });
        stream::empty().boxed()
    };
    let (len, pieces) = match result {
        Ok(content) => content,
        Err(error) => return leave_out(error.0),
    };
    let head = match head(&name, len) {
        Ok(head) => head,
        Err(e) => {
            let detail = format!("{name:?} cannot be the name of a tar member: {e}");
            return leave_out(
                ApiError::new(Code::BadRequest, detail, "request frames instead of an archive").0,
            );
        }
    };
    let pad =
        Bytes::from_static(&END).slice(..usize::try_from(len.next_multiple_of(BLOCK) - len).unwrap_or(0));
    let pieces = match pieces {
        Content::Buffered(pieces) => stream::iter(pieces).map(Ok).boxed(),
        Content::Streamed(pieces) => pieces,
    };
    let begin = stream::iter([Ok(Piece::Framing(head.into()))]);
    let end = stream::iter([Ok(Piece::Framing(pad))]);
    reservation.until_sent(begin.chain(pieces.map(|p| p.map_err(BodyError::from))).chain(end)).boxed()
}

/// Returns a member's header, after the records that a long name needs.
fn head(name: &str, len: u64) -> std::io::Result<Vec<u8>> {
    let mut header = tar::Header::new_gnu();
    header.set_size(len);
    header.set_mode(0o444);
    header.set_mtime(0);
    header.set_entry_type(tar::EntryType::Regular);
    let mut builder = tar::Builder::new(Vec::new());
    // The library writes the header only; the content follows in pieces.
    builder.append_data(&mut header, name, std::io::empty())?;
    let mut out = builder.into_inner()?;
    out.truncate(out.len() - END.len());
    Ok(out)
}

fn archive_end(missing: &[MissingItem]) -> Result<Vec<u8>, BodyError> {
    let mut out = Vec::new();
    if !missing.is_empty() {
        let text = serde_json::to_vec_pretty(missing)?;
        out = head(PROBLEMS, text.len() as u64)?;
        out.extend_from_slice(&text);
        out.resize(out.len().next_multiple_of(512), 0);
    }
    out.extend_from_slice(&END);
    Ok(out)
}
