//! Writes and deletes one object.
//!
//! `PutMode::Create` uses a conditional request. AWS, Azure and GCS honour it. Some servers that speak S3
//! ignore the condition and answer 200, which would silently replace another writer's object. So each
//! configured endpoint is probed once, before the first create: a second create of the same name must fail.
//!
//! At an endpoint without conditional requests, a create checks first and then writes. Two writers at once
//! may then both succeed, and the object of the last one stays. Fletch creates objects whose names follow
//! from their content, so both writers wrote the same bytes.

use super::translate::{translate, unavailable};
use super::{Current, ReadKey, RemotePrefix};
use crate::OriginError;
use crate::object::PutMode;
use crate::uri::Scheme;
use bytes::Bytes;
use object_store::path::Path as Key;
use object_store::{ObjectStoreExt as _, PutOptions};
use tokio::time::timeout;

/// The key prefix of probe objects, below the origin's prefix. Objects below `fletch/` are never indexed.
const PROBE: &str = "fletch/probe-";

impl RemotePrefix {
    pub async fn put(&self, what: &str, path: &str, bytes: Bytes, mode: PutMode) -> Result<(), OriginError> {
        self.writable(what)?;
        if mode == PutMode::Create && !self.has_conditional_create(what).await? {
            return self.create_if_absent(what, path, bytes).await;
        }
        self.put_with_retries(what, path, bytes, mode).await
    }

    pub(super) async fn put_with_retries(
        &self,
        what: &str,
        path: &str,
        bytes: Bytes,
        mode: PutMode,
    ) -> Result<(), OriginError> {
        let key = &self.key(what, path)?;
        let bytes = &bytes;
        self.remote
            .retried(what, bytes.len() as u64, |attempt, at| async move {
                self.put_once(&at, what, path, key, bytes, mode, attempt).await
            })
            .await
    }

    pub(super) fn writable(&self, what: &str) -> Result<(), OriginError> {
        match self.remote.scheme.is_plain() {
            true => Err(OriginError::invalid(
                what,
                "a plain HTTP server is read-only; write to another origin with --tables URI",
            )),
            false => Ok(()),
        }
    }

    #[expect(clippy::too_many_arguments, reason = "the parts of one request, each used once")]
    async fn put_once(
        &self,
        at: &Current,
        what: &str,
        path: &str,
        key: &Key,
        bytes: &Bytes,
        mode: PutMode,
        attempt: u32,
    ) -> Result<(), OriginError> {
        let mode_there = match mode {
            PutMode::Create => object_store::PutMode::Create,
            PutMode::Overwrite => object_store::PutMode::Overwrite,
        };
        let options = PutOptions { mode: mode_there, ..PutOptions::default() };
        let put = at.store.objects().put_opts(key, bytes.clone().into(), options);
        // Half the deadline: a lost answer leaves time for a retry.
        let put = match timeout(self.remote.limits.io_timeout / 2, put).await {
            Ok(put) => put.map_err(|e| translate(what, &e)),
            Err(_) => Err(unavailable(what, "no answer to a write within half of io_timeout")),
        };
        match put {
            Ok(_) => Ok(()),
            Err(OriginError::AlreadyExists { .. } | OriginError::Changed { .. })
                if mode == PutMode::Create =>
            {
                // An earlier attempt of this call may have succeeded although its answer was lost.
                let written = ReadKey { key: key.clone(), rewrite: None };
                let there = self.get_once(at, what, path, &written, None, None);
                let ours = attempt > 1 && there.await?.bytes == *bytes;
                if ours { Ok(()) } else { Err(OriginError::AlreadyExists { what: what.to_owned() }) }
            }
            Err(error) => Err(error),
        }
    }

    pub async fn delete(&self, what: &str, path: &str) -> Result<(), OriginError> {
        self.writable(what)?;
        let key = &self.key(what, path)?;
        let remote = &self.remote;
        let deleted = remote
            .retried(what, 0, |_, at| async move {
                remote.with_patience(what, at.store.objects().delete(key)).await
            })
            .await;
        match deleted {
            Err(OriginError::NotFound { .. }) => Ok(()),
            other => other,
        }
    }

    /// Returns whether the store honours the condition of [`PutMode::Create`]. Probes each origin once.
    pub async fn has_conditional_create(&self, what: &str) -> Result<bool, OriginError> {
        let remote = &self.remote;
        if remote.scheme != Scheme::S3 || remote.config.endpoint.is_none() {
            return Ok(true);
        }
        remote.conditional_create.get_or_try_init(|| self.probe(what)).await.copied()
    }

    async fn probe(&self, what: &str) -> Result<bool, OriginError> {
        let path = format!("{PROBE}{:032x}", rand::random::<u128>());
        let create = || self.put_with_retries(what, &path, Bytes::from_static(b"probe"), PutMode::Create);
        let kept = match create().await {
            // The server rejects conditional requests.
            Err(OriginError::Invalid { .. }) => return Ok(self.warn_not_atomic(what)),
            Err(error) => return Err(error),
            Ok(()) => match create().await {
                Err(OriginError::AlreadyExists { .. }) => true,
                Ok(()) | Err(OriginError::Invalid { .. }) => self.warn_not_atomic(what),
                Err(error) => return Err(error),
            },
        };
        if let Err(error) = self.delete(what, &path).await {
            tracing::warn!(%error, path, "could not delete the probe object; it stays at the origin");
        }
        Ok(kept)
    }

    fn warn_not_atomic(&self, what: &str) -> bool {
        tracing::warn!(
            what,
            "the store ignores If-None-Match; creates check first and then write, which is not atomic"
        );
        false
    }

    /// Creates an object at a store without conditional requests: checks first, then writes.
    pub(super) async fn create_if_absent(
        &self,
        what: &str,
        path: &str,
        bytes: Bytes,
    ) -> Result<(), OriginError> {
        match self.head(what, path).await {
            Ok(_) => Err(OriginError::AlreadyExists { what: what.to_owned() }),
            Err(OriginError::NotFound { .. }) => {
                self.put_with_retries(what, path, bytes, PutMode::Overwrite).await
            }
            Err(error) => Err(error),
        }
    }
}
