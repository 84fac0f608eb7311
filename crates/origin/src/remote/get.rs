//! Reads of objects: the request, the check of its answer against a pin, and the bytes.

use super::translate::{cause, changed, translate, unavailable, wrong_answer};
use super::{Current, ReadKey, Remote, RemotePrefix};
use crate::OriginError;
use crate::entity_tag::{EntityTag, TagMatch};
use crate::object::{ObjectBytes, ObjectMeta, Pin, PinCheck};
use crate::stalls;
use crate::transport::{Answered, BadAnswer};
use crate::uri::Scheme;
use bytes::{Bytes, BytesMut};
use futures::StreamExt as _;
use object_store::{Error, GetOptions, GetRange, GetResult};
use std::ops::Range;
use std::sync::atomic::Ordering::Relaxed;
use tokio::time::timeout;

/// The longest object that is read whole to return a part of it, at a server without ranges.
const WHOLE_BYTES_MAX: u64 = 16 << 20;

impl Remote {
    /// Returns the metadata that a listing or an answer has of an object.
    pub(super) fn meta_of(&self, path: &str, meta: &object_store::ObjectMeta) -> ObjectMeta {
        let mtime_ns = meta.last_modified.timestamp_nanos_opt();
        let etag = meta.e_tag.clone().map(|etag| match self.scheme {
            // Azure quotes etags in headers but not in listings.
            Scheme::Azure if !etag.starts_with('"') && !etag.is_empty() => format!("\"{etag}\""),
            _ => etag,
        });
        let etag = etag.filter(|etag| !etag.is_empty());
        ObjectMeta {
            path: path.to_owned(),
            size: meta.size,
            // `object_store` returns 1970 if a store sends no time, and so does the transport for it.
            mtime_ns: mtime_ns.filter(|t| *t != 0),
            etag,
        }
    }
}

impl RemotePrefix {
    pub async fn get(
        &self,
        what: &str,
        path: &str,
        range: Option<Range<u64>>,
        pin: Option<(&Pin, PinCheck)>,
    ) -> Result<ObjectBytes, OriginError> {
        let key = &self.read_key(what, path)?;
        let range = &range;
        let expected = range.as_ref().map_or(pin.map_or(0, |(pin, _)| pin.size), |r| r.end - r.start);
        self.remote
            .read(what, expected, |_, at| async move {
                self.get_once(&at, what, path, key, range.clone(), pin).await
            })
            .await
            .inspect(|got| self.remote.pace.charge_more((got.bytes.len() as u64).saturating_sub(expected)))
    }

    async fn ask(
        &self,
        at: &Current,
        what: &str,
        key: &ReadKey,
        options: GetOptions,
    ) -> Result<object_store::Result<GetResult>, OriginError> {
        timeout(self.remote.patience(), at.store.objects().get_opts(&key.key, options))
            .await
            .map_err(|_| unavailable(what, "no answer within a third of io_timeout"))
    }

    /// Asks once for the metadata of an object.
    pub(super) async fn head_once(
        &self,
        at: &Current,
        what: &str,
        path: &str,
        key: &ReadKey,
    ) -> Result<ObjectMeta, OriginError> {
        let options = GetOptions { head: true, ..key.options() };
        let result = self.ask(at, what, key, options).await?.map_err(|e| translate(what, &e))?;
        Ok(self.remote.meta_of(path, &result.meta))
    }

    pub(super) async fn get_once(
        &self,
        at: &Current,
        what: &str,
        path: &str,
        key: &ReadKey,
        range: Option<Range<u64>>,
        checked: Option<(&Pin, PinCheck)>,
    ) -> Result<ObjectBytes, OriginError> {
        let remote = &self.remote;
        let plain = remote.scheme.is_plain();
        let pin = checked.map(|(pin, _)| pin);
        // HTTP has no range of zero bytes, but the object must exist.
        let head = range.as_ref().is_some_and(Range::is_empty);
        let mut condition = pin.and_then(Pin::condition);
        let all = |r: &Range<u64>| r.start == 0 && pin.is_some_and(|p| p.size == r.end);
        let mut sent =
            range.clone().filter(|r| !head && !(plain && (all(r) || remote.whole_only.load(Relaxed))));
        // At most three rounds: each repetition takes something out of the request.
        let answer = loop {
            let options = GetOptions {
                if_match: condition.clone(),
                range: sent.clone().map(GetRange::Bounded),
                head,
                ..key.options()
            };
            match self.ask(at, what, key, options).await? {
                // The object, or only the form of its tag, is another one: the answer without a condition
                // tells which. Azure answers 412 for a deleted blob, too.
                Err(Error::Precondition { .. }) if condition.is_some() => condition = None,
                Err(error)
                    if plain
                        && sent.is_some()
                        && matches!(cause(&error), Some(BadAnswer::RangeIgnored(_))) =>
                {
                    // Ranges are optional in HTTP. From now on, request whole objects.
                    if !remote.whole_only.swap(true, Relaxed) {
                        tracing::warn!(
                            origin = %remote.config.prefix,
                            "the server does not support ranges; objects over 16 MiB cannot be read from it"
                        );
                    }
                    sent = None;
                }
                answer => break answer,
            }
        };
        let result = match answer {
            Ok(result) => result,
            Err(error) => {
                if let (Some(range), Some(checked), Some(BadAnswer::PastEnd { .. })) =
                    (&range, checked, cause(&error))
                    && range.end <= checked.0.size
                {
                    return Err(self.past_end(at, what, path, key, checked).await);
                }
                return Err(translate(what, &error));
            }
        };
        let answered = result.extensions.get::<Answered>().copied();
        let mut meta = remote.meta_of(path, &result.meta);
        if answered.is_some_and(|a| a.is_size_unknown) {
            // `Content-Range: bytes 0-9/*`: the etag of the answer, or the hash of the bytes, decides.
            meta.size = match pin {
                Some(pin) => pin.size,
                None => self.head_once(at, what, path, key).await?.size,
            };
        }
        check_pin(what, checked, &meta.pin(), answered)?;
        let asked = range.unwrap_or(0..meta.size);
        if asked.end > meta.size {
            return Err(OriginError::invalid(
                what,
                format!("the range {asked:?} ends after the object's {} bytes", meta.size),
            ));
        }
        if head {
            return Ok(ObjectBytes { bytes: Bytes::new(), meta });
        }
        let expected = sent.unwrap_or(0..meta.size);
        if result.range != expected {
            let got = &result.range;
            return Err(wrong_answer(what, format!("the server sent bytes {got:?} instead of {expected:?}")));
        }
        let part = expected != asked;
        if part && meta.size > WHOLE_BYTES_MAX {
            return Err(OriginError::invalid(
                what,
                format!(
                    "the server does not support ranges, and the object has {} bytes, more than the 16 MiB \
                     that can be read without; use a server with ranges, such as nginx",
                    meta.size
                ),
            ));
        }
        let bytes = self.collect(what, result, expected.end - expected.start, answered).await?;
        if part {
            let at = |n: u64| usize::try_from(n).map_err(|e| OriginError::invalid(what, e));
            // A copy, so that the part does not keep the whole object in memory.
            let bytes = Bytes::copy_from_slice(&bytes[at(asked.start)?..at(asked.end)?]);
            return Ok(ObjectBytes { bytes, meta });
        }
        Ok(ObjectBytes { bytes, meta })
    }

    /// Returns the error of a 416 for a range that the pinned object has.
    ///
    /// The object itself decides: if it has become shorter, it changed. If it is as it was pinned, the answer
    /// came from a replica that is behind, and another attempt may reach another one.
    async fn past_end(
        &self,
        at: &Current,
        what: &str,
        path: &str,
        key: &ReadKey,
        checked: (&Pin, PinCheck),
    ) -> OriginError {
        let meta = match self.head_once(at, what, path, key).await {
            Ok(meta) => meta,
            Err(error) => return error,
        };
        match check_pin(what, Some(checked), &meta.pin(), None) {
            Err(error) => error,
            Ok(()) => unavailable(
                what,
                "status 416 for a range that the object has: a replica of the store is behind",
            ),
        }
    }

    async fn collect(
        &self,
        what: &str,
        result: GetResult,
        length: u64,
        answered: Option<Answered>,
    ) -> Result<Bytes, OriginError> {
        let max = self.remote.limits.get_bytes_max;
        if length > max {
            return Err(OriginError::invalid(
                what,
                format!("one read of {length} bytes, at most {max} are allowed; read by range"),
            ));
        }
        let length = usize::try_from(length).map_err(|e| OriginError::invalid(what, e))?;
        let said = answered.map(|a| format!("{a}; ")).unwrap_or_default();
        let mut stream = result.into_stream();
        let mut bytes = BytesMut::with_capacity(length);
        loop {
            let piece = match timeout(self.remote.patience(), stream.next()).await {
                Ok(None) => break,
                Ok(Some(piece)) => piece.map_err(|e| match translate(what, &e) {
                    OriginError::Unavailable { why, .. } => {
                        let came = bytes.len();
                        let why = format!("{said}the answer ended after {came} of {length} bytes: {why}");
                        unavailable(what, &why)
                    }
                    other => other,
                })?,
                Err(_) => {
                    let why = format!("the answer stalled after {} of {length} bytes", bytes.len());
                    return Err(unavailable(what, &why));
                }
            };
            stalls::heard();
            self.remote.counters.read(piece.len() as u64);
            self.meter.read(piece.len() as u64);
            if piece.len() > length - bytes.len() {
                let why = format!("{said}the answer has more than the requested {length} bytes");
                return Err(wrong_answer(what, why));
            }
            bytes.extend_from_slice(&piece);
        }
        if bytes.len() < length {
            let why = format!("{said}the answer has {} of the requested {length} bytes", bytes.len());
            return Err(wrong_answer(what, why));
        }
        Ok(bytes.freeze())
    }
}

/// Compares an object with its pin. A store may ignore `If-Match`, and a pin may have no etag.
///
/// An answer with a content coding, or with the pin's strong etag and another length, does not describe the
/// pinned object: something between the store and this process made it.
fn check_pin(
    what: &str,
    checked: Option<(&Pin, PinCheck)>,
    now: &Pin,
    answered: Option<Answered>,
) -> Result<(), OriginError> {
    let Some((pin, check)) = checked else { return Ok(()) };
    let Some(why) = pin.difference(now) else { return Ok(()) };
    let same_tag = EntityTag::compare(pin.etag.as_deref(), now.etag.as_deref()) == TagMatch::Same;
    match answered {
        Some(answered) if answered.coding.is_some() => {
            Err(wrong_answer(what, answered.expected(format!("the stored bytes, {} of them", pin.size))))
        }
        Some(answered) if same_tag && pin.condition().is_some() => {
            let expected = format!("{} bytes: the etag is that of the indexed object", pin.size);
            Err(wrong_answer(what, answered.expected(expected)))
        }
        _ if check == PinCheck::SizeThenHash && pin.size_difference(now).is_none() => Ok(()),
        _ => Err(changed(what, &why)),
    }
}
