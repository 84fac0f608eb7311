//! A batch as a tar archive. Items that fail before their header is written are left out and
//! listed in a last member, [`PROBLEMS`]; one that fails later cuts the connection.

use super::{Content, Item};
use crate::http::{
    body::{Broken, Piece},
    problem::Fault,
};
use bytes::Bytes;
use fletch_api::{Code, Problem};
use futures::{Stream, StreamExt as _, stream, stream::BoxStream};
use serde::Serialize;
use std::sync::{Arc, Mutex, PoisonError};

/// The member that lists what is missing.
const PROBLEMS: &str = "fletch-problems.json";
const BLOCK: u64 = 512;
/// Two zero blocks end an archive.
const END: [u8; 1024] = [0; 1024];

#[derive(Serialize)]
struct Missing {
    index: u32,
    problem: Box<Problem>,
}

/// The archive of items with bytes, in order.
pub(super) fn archive(
    items: impl Stream<Item = Item> + Send + 'static,
) -> impl Stream<Item = Result<Piece, Broken>> + Send + 'static {
    let missing = Arc::new(Mutex::new(Vec::<Missing>::new()));
    let seen = Arc::clone(&missing);
    let members = items.map(move |item| member(item, &seen)).flatten();
    let end = stream::once(async move {
        let missing = std::mem::take(&mut *missing.lock().unwrap_or_else(PoisonError::into_inner));
        Ok(Piece::Framing(ending(&missing)?.into()))
    });
    members.chain(end)
}

fn member(item: Item, missing: &Mutex<Vec<Missing>>) -> BoxStream<'static, Result<Piece, Broken>> {
    let Item { index, name, what, held } = item;
    let note = |problem: Box<Problem>| {
        missing.lock().unwrap_or_else(PoisonError::into_inner).push(Missing { index, problem });
        stream::empty().boxed()
    };
    let (len, pieces) = match what {
        Ok(what) => what,
        Err(fault) => return note(fault.0),
    };
    let head = match head(&name, len) {
        Ok(head) => head,
        Err(e) => {
            let detail = format!("{name:?} cannot be a member's name: {e}");
            return note(Fault::new(Code::BadRequest, detail, "ask for frames").0);
        }
    };
    let pad =
        Bytes::from_static(&END).slice(..usize::try_from(len.next_multiple_of(BLOCK) - len).unwrap_or(0));
    let pieces = match pieces {
        Content::Ready(pieces) => stream::iter(pieces).map(Ok).boxed(),
        Content::Later(pieces) => pieces,
    };
    let begin = stream::iter([Ok(Piece::Framing(head.into()))]);
    let end = stream::iter([Ok(Piece::Framing(pad))]);
    held.until_sent(begin.chain(pieces.map(|p| p.map_err(Broken::from))).chain(end)).boxed()
}

/// A member's header, with the records a long name needs before it.
fn head(name: &str, len: u64) -> std::io::Result<Vec<u8>> {
    let mut header = tar::Header::new_gnu();
    header.set_size(len);
    header.set_mode(0o444);
    header.set_mtime(0);
    header.set_entry_type(tar::EntryType::Regular);
    let mut builder = tar::Builder::new(Vec::new());
    // The library writes headers only: content follows in pieces of its own.
    builder.append_data(&mut header, name, std::io::empty())?;
    let mut out = builder.into_inner()?;
    out.truncate(out.len() - END.len());
    Ok(out)
}

fn ending(missing: &[Missing]) -> Result<Vec<u8>, Broken> {
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
