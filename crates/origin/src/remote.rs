//! Blob stores, through `object_store`. Translates calls and errors; decides nothing but whether
//! an answer is the one that was asked for.

use crate::origin::{Got, ObjectMeta, Pin, PutMode};
use crate::retry::retrying;
use crate::stats::Counters;
use crate::wire::{Answer, Connector};
use crate::{Credentials, OriginConfig, OriginError, OriginLimits, credentials};
use bytes::{Bytes, BytesMut};
use futures::StreamExt as _;
use object_store::aws::{AmazonS3, AmazonS3Builder};
use object_store::client::HttpError;
use object_store::multipart::MultipartStore as _;
use object_store::path::Path as Key;
use object_store::{
    ClientOptions, Error, GetOptions, GetRange, GetResult, ObjectStore as _, ObjectStoreExt as _, PutOptions,
    RetryConfig,
};
use std::fmt;
use std::fs::File;
use std::future::Future;
use std::io::Read as _;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;
use tokio::time::{Instant, timeout};

mod pages;

/// Bytes of one request of a large write. Grows so that 9,000 parts are enough for any file.
const PART_BYTES: u64 = 16 << 20;
const PARTS_MAX: u64 = 9_000;

/// One bucket and how to reach it.
pub(crate) struct Remote {
    store: AmazonS3,
    limits: OriginLimits,
    counters: Arc<Counters>,
}

impl fmt::Debug for Remote {
    /// Not derived: the store shows the id of its key.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Remote(..)")
    }
}

/// A prefix of a bucket.
#[derive(Debug, Clone)]
pub(crate) struct Reach {
    pub remote: Arc<Remote>,
    /// Empty, or a clean path.
    pub prefix: String,
}

impl Remote {
    pub fn new(
        config: &OriginConfig,
        bucket: &str,
        limits: OriginLimits,
        counters: &Arc<Counters>,
    ) -> Result<Self, OriginError> {
        let what = format!("[[origin]] {}", config.prefix);
        let builder = match &config.credentials {
            None | Some(Credentials::Env) => AmazonS3Builder::from_env(),
            Some(Credentials::Anonymous) => AmazonS3Builder::new().with_skip_signature(true),
            Some(Credentials::File(path)) => {
                let pair = credentials::load(path)?;
                let builder =
                    AmazonS3Builder::new().with_access_key_id(pair.id).with_secret_access_key(pair.secret);
                match pair.token {
                    Some(token) => builder.with_token(token),
                    None => builder,
                }
            }
        };
        let options = ClientOptions::new()
            .with_allow_http(config.allow_http)
            .with_http1_only()
            .with_connect_timeout(limits.io_timeout.min(Duration::from_secs(5)))
            // Deadlines are ours: one for a call, and one for each wait inside it.
            .with_timeout_disabled();
        let mut builder = builder
            .with_bucket_name(bucket)
            .with_client_options(options)
            .with_disable_bulk_delete(true)
            // Retries happen in one place, and that is not this one.
            .with_retry(RetryConfig {
                max_retries: 0,
                retry_timeout: Duration::ZERO,
                ..RetryConfig::default()
            })
            .with_http_connector(Connector(Arc::clone(counters)));
        if let Some(endpoint) = &config.endpoint {
            builder = builder.with_endpoint(endpoint.trim_end_matches('/'));
        }
        if let Some(region) = &config.region {
            builder = builder.with_region(region);
        }
        let store = builder.build().map_err(|e| OriginError::invalid(what, e))?;
        Ok(Remote { store, limits, counters: Arc::clone(counters) })
    }

    /// The longest wait for one answer or one more piece of it: a stalled connection leaves time
    /// for another within the call's deadline.
    fn patience(&self) -> Duration {
        self.limits.io_timeout / 3
    }

    async fn patiently<T>(
        &self,
        what: &str,
        answer: impl Future<Output = object_store::Result<T>>,
    ) -> Result<T, OriginError> {
        match timeout(self.patience(), answer).await {
            Ok(result) => result.map_err(|e| translate(what, &e)),
            Err(_) => Err(unavailable(what, "no answer in a third of io_timeout")),
        }
    }
}

impl Reach {
    fn key(&self, what: &str, path: &str) -> Result<Key, OriginError> {
        let full = if self.prefix.is_empty() { path.to_owned() } else { format!("{}/{path}", self.prefix) };
        // Not `Key::from`, which would encode the name instead of keeping it.
        Key::parse(full).map_err(|e| OriginError::invalid(what, e))
    }

    pub async fn get(
        &self,
        what: &str,
        path: &str,
        range: Option<Range<u64>>,
        pin: Option<&Pin>,
    ) -> Result<Got, OriginError> {
        let remote = &self.remote;
        let key = self.key(what, path)?;
        // There is no request for zero bytes, but the object has to be there.
        let head = range.as_ref().is_some_and(Range::is_empty);
        let options = GetOptions {
            if_match: pin.and_then(|p| p.etag.clone()),
            range: range.clone().filter(|_| !head).map(GetRange::Bounded),
            head,
            ..GetOptions::default()
        };
        let answer = timeout(remote.patience(), remote.store.get_opts(&key, options)).await;
        let result = match answer.map_err(|_| unavailable(what, "no answer in a third of io_timeout"))? {
            Ok(result) => result,
            Err(error) => {
                let fitted = pin.is_some_and(|p| range.as_ref().is_some_and(|r| r.end <= p.size));
                if fitted && cause(&error) == Some(&Answer::PastEnd) {
                    return Err(changed(what, "the range lies past its end now"));
                }
                return Err(translate(what, &error));
            }
        };
        let meta = meta_of(path, &result.meta);
        check_pin(what, pin, &meta)?;
        let asked = range.unwrap_or(0..meta.size);
        if asked.end > meta.size {
            return Err(OriginError::invalid(what, format!("range {asked:?} of {} bytes", meta.size)));
        }
        if head {
            return Ok(Got { bytes: Bytes::new(), meta });
        }
        if result.range != asked {
            return Err(corrupt(what, format!("bytes {:?} for bytes {asked:?}", result.range)));
        }
        let bytes = self.collect(what, result, asked.end - asked.start).await?;
        Ok(Got { bytes, meta })
    }

    async fn collect(&self, what: &str, result: GetResult, length: u64) -> Result<Bytes, OriginError> {
        let max = self.remote.limits.get_bytes_max;
        if length > max {
            return Err(OriginError::invalid(
                what,
                format!("{length} bytes in one read; at most {max} are held, read by range"),
            ));
        }
        let length = usize::try_from(length).map_err(|e| OriginError::invalid(what, e))?;
        let mut stream = result.into_stream();
        let mut bytes = BytesMut::with_capacity(length);
        loop {
            let piece = match timeout(self.remote.patience(), stream.next()).await {
                Ok(None) => break,
                Ok(Some(piece)) => piece.map_err(|e| translate(what, &e))?,
                Err(_) => {
                    let why = format!("stalled after {} of {length} bytes", bytes.len());
                    return Err(unavailable(what, &why));
                }
            };
            self.remote.counters.read(piece.len() as u64);
            if piece.len() > length - bytes.len() {
                return Err(corrupt(what, format!("more than the {length} bytes that were asked for")));
            }
            bytes.extend_from_slice(&piece);
        }
        if bytes.len() < length {
            return Err(corrupt(what, format!("{} bytes of {length}", bytes.len())));
        }
        Ok(bytes.freeze())
    }

    pub async fn head(&self, what: &str, path: &str) -> Result<ObjectMeta, OriginError> {
        let key = self.key(what, path)?;
        let meta = self.remote.patiently(what, self.remote.store.head(&key)).await?;
        Ok(meta_of(path, &meta))
    }

    pub async fn put(
        &self,
        what: &str,
        path: &str,
        bytes: Bytes,
        mode: PutMode,
        attempt: u32,
    ) -> Result<(), OriginError> {
        let key = self.key(what, path)?;
        let mode_there = match mode {
            PutMode::Create => object_store::PutMode::Create,
            PutMode::Overwrite => object_store::PutMode::Overwrite,
        };
        let options = PutOptions { mode: mode_there, ..PutOptions::default() };
        let put = self.remote.store.put_opts(&key, bytes.clone().into(), options);
        // Half of the time there is: an answer that is lost leaves time to ask again.
        let put = match timeout(self.remote.limits.io_timeout / 2, put).await {
            Ok(put) => put.map_err(|e| translate(what, &e)),
            Err(_) => Err(unavailable(what, "no answer to a write in half of io_timeout")),
        };
        match put {
            Ok(_) => Ok(()),
            Err(OriginError::AlreadyExists { .. } | OriginError::Changed { .. })
                if mode == PutMode::Create =>
            {
                // An earlier attempt of ours may have arrived although its answer did not.
                let ours = attempt > 1 && self.get(what, path, None, None).await?.bytes == bytes;
                if ours { Ok(()) } else { Err(OriginError::AlreadyExists { what: what.to_owned() }) }
            }
            Err(error) => Err(error),
        }
    }

    pub async fn put_file(
        &self,
        what: &str,
        path: &str,
        file: &Path,
        mode: PutMode,
    ) -> Result<u64, OriginError> {
        let shown = file.display().to_string();
        let opened = crate::local::open_regular(file).map_err(|e| OriginError::io(&shown, &e))?;
        let (file, length) = (Arc::new(opened.0), opened.1.len());
        if length <= PART_BYTES {
            let bytes = part(&shown, &file, length).await?;
            self.each(what, |attempt| self.put(what, path, bytes.clone(), mode, attempt)).await?;
            return Ok(length);
        }
        if mode == PutMode::Create {
            match self.each(what, |_| self.head(what, path)).await {
                Ok(_) => return Err(OriginError::AlreadyExists { what: what.to_owned() }),
                Err(OriginError::NotFound { .. }) => {}
                Err(error) => return Err(error),
            }
        }
        let key = self.key(what, path)?;
        let store = &self.remote.store;
        let id = self
            .each(what, |_| async { store.create_multipart(&key).await.map_err(|e| translate(what, &e)) })
            .await?;
        let sent = self.parts(what, &key, &id, &shown, &file, length).await;
        if sent.is_err()
            && let Err(error) = self.remote.patiently(what, store.abort_multipart(&key, &id)).await
        {
            tracing::warn!(%error, "an unfinished upload stays at the store until its lifecycle rule removes it");
        }
        sent.map(|()| length)
    }

    async fn parts(
        &self,
        what: &str,
        key: &Key,
        id: &String,
        shown: &str,
        file: &Arc<File>,
        length: u64,
    ) -> Result<(), OriginError> {
        let store = &self.remote.store;
        let step = PART_BYTES.max(length.div_ceil(PARTS_MAX));
        let mut ids = Vec::new();
        for (index, start) in (0..length).step_by(usize::try_from(step).unwrap_or(usize::MAX)).enumerate() {
            let bytes = part(shown, file, step.min(length - start)).await?;
            let put = |_| async {
                let put = store.put_part(key, id, index, bytes.clone().into()).await;
                put.map_err(|e| translate(what, &e))
            };
            ids.push(self.each(what, put).await?);
        }
        let complete = |_| async {
            let done = store.complete_multipart(key, id, ids.clone()).await;
            done.map(|_| ()).map_err(|e| translate(what, &e))
        };
        self.each(what, complete).await
    }

    /// One request of a larger call, with a deadline and retries of its own.
    async fn each<T, F: Future<Output = Result<T, OriginError>>>(
        &self,
        what: &str,
        once: impl FnMut(u32) -> F,
    ) -> Result<T, OriginError> {
        let limits = self.remote.limits;
        retrying(what, Instant::now() + limits.io_timeout, limits.attempts_max, &self.remote.counters, once)
            .await
    }

    pub async fn delete(&self, what: &str, path: &str) -> Result<(), OriginError> {
        let key = self.key(what, path)?;
        match self.remote.patiently(what, self.remote.store.delete(&key)).await {
            Err(OriginError::NotFound { .. }) => Ok(()),
            other => other,
        }
    }
}

/// The next `length` bytes of `file`.
async fn part(shown: &str, file: &Arc<File>, length: u64) -> Result<Bytes, OriginError> {
    let file = Arc::clone(file);
    let read = tokio::task::spawn_blocking(move || {
        let mut bytes = Vec::with_capacity(usize::try_from(length).unwrap_or_default());
        (&*file).take(length).read_to_end(&mut bytes)?;
        if (bytes.len() as u64) < length {
            return Err(std::io::Error::other("the file shrank while it was written to the origin"));
        }
        Ok(Bytes::from(bytes))
    });
    let read = read.await.map_err(|e| unavailable(shown, &e.to_string()))?;
    read.map_err(|e| OriginError::io(shown, &e))
}

fn meta_of(path: &str, meta: &object_store::ObjectMeta) -> ObjectMeta {
    ObjectMeta {
        path: path.to_owned(),
        size: meta.size,
        mtime_ns: meta.last_modified.timestamp_nanos_opt(),
        etag: meta.e_tag.clone(),
    }
}

/// A store may ignore `If-Match`, and an object may have been pinned without an etag.
fn check_pin(what: &str, pin: Option<&Pin>, meta: &ObjectMeta) -> Result<(), OriginError> {
    let Some(pin) = pin else { return Ok(()) };
    if pin.size != meta.size {
        return Err(changed(what, &format!("{} bytes then, {} now", pin.size, meta.size)));
    }
    match (&pin.etag, &meta.etag) {
        (Some(then), Some(now)) if then != now => Err(changed(what, &format!("etag {then} then, {now} now"))),
        (Some(then), None) => Err(changed(what, &format!("etag {then} then, none now"))),
        (None, _) if pin.mtime_ns.is_some() && pin.mtime_ns != meta.mtime_ns => {
            Err(changed(what, "modified at another time"))
        }
        _ => Ok(()),
    }
}

fn changed(what: &str, why: &str) -> OriginError {
    OriginError::Changed { what: what.to_owned(), why: why.to_owned() }
}

fn corrupt(what: &str, why: String) -> OriginError {
    OriginError::Corrupt { what: what.to_owned(), why }
}

fn unavailable(what: &str, why: &str) -> OriginError {
    OriginError::Unavailable { what: what.to_owned(), why: why.to_owned() }
}

/// The one place where the store's errors become ours. Texts of the store that may repeat parts
/// of a signed request are left out.
fn translate(what: &str, error: &Error) -> OriginError {
    let owned = what.to_owned();
    match error {
        Error::NotFound { .. } => return OriginError::NotFound { what: owned },
        Error::AlreadyExists { .. } => return OriginError::AlreadyExists { what: owned },
        Error::Precondition { .. } | Error::NotModified { .. } => {
            return changed(what, "its etag is another");
        }
        Error::InvalidPath { source } => return OriginError::invalid(what, source),
        Error::NotSupported { .. } | Error::NotImplemented { .. } | Error::UnknownConfigurationKey { .. } => {
            return OriginError::invalid(what, "the store cannot do this");
        }
        _ => {}
    }
    if let Some(answer) = cause::<Answer>(error) {
        let why = answer.to_string();
        return match answer {
            Answer::SlowDown { retry_after } => {
                OriginError::Throttled { what: owned, retry_after: *retry_after }
            }
            Answer::Failed { .. } => OriginError::Unavailable { what: owned, why },
            Answer::Denied { .. } => OriginError::Denied { what: owned, why },
            Answer::Refused { .. } | Answer::PastEnd => OriginError::Invalid { what: owned, why },
            Answer::RangeIgnored | Answer::TooLong => OriginError::Corrupt { what: owned, why },
        };
    }
    let transport = cause::<HttpError>(error);
    match (transport, error) {
        (Some(error), _) => unavailable(what, &deepest(error)),
        (None, Error::PermissionDenied { .. } | Error::Unauthenticated { .. }) => {
            OriginError::Denied { what: owned, why: "the store said so".to_owned() }
        }
        (None, Error::Generic { .. }) => corrupt(what, deepest(error)),
        (None, _) => unavailable(what, &deepest(error)),
    }
}

/// The first cause that is a `T`.
fn cause<T: std::error::Error + 'static>(error: &Error) -> Option<&T> {
    let mut source = std::error::Error::source(error);
    while let Some(next) = source {
        match next.downcast_ref() {
            Some(found) => return Some(found),
            None => source = next.source(),
        }
    }
    None
}

/// The innermost cause: "connection refused" rather than a chain of wrappers.
fn deepest(error: &dyn std::error::Error) -> String {
    let mut last: &dyn std::error::Error = error;
    while let Some(next) = last.source() {
        last = next;
    }
    last.to_string()
}
