//! The calls that change what a server does: registrations, warm-ups, evictions.

use crate::body::Length;
use crate::client::JSON_BYTES_MAX;
use crate::{Client, ClientError};
use fletch_api::{Dataset, Datasets, Evicted, RegisterDataset, StartWarmup, Warmup, routes};
use fletch_core::DatasetName;
use http::{Method, StatusCode};
use serde::de::DeserializeOwned;

impl Client {
    /// All datasets of the asking principal's domain.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn datasets(&self) -> Result<Vec<Dataset>, ClientError> {
        Ok(self.get_json::<Datasets>(routes::DATASETS).await?.datasets)
    }

    /// One dataset.
    ///
    /// # Errors
    /// [`ClientError`]; `not_found` when it is not registered, or not for this principal.
    pub async fn dataset(&self, name: &DatasetName) -> Result<Dataset, ClientError> {
        self.get_json(&routes::dataset(name)).await
    }

    /// Registers a dataset; the same again changes nothing.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn register(&self, what: &RegisterDataset) -> Result<Dataset, ClientError> {
        let body = serde_json::to_vec(what).map_err(|e| ClientError::Config(e.to_string()))?;
        let want = [StatusCode::OK, StatusCode::CREATED];
        let request = || self.json_request(Method::POST, routes::DATASETS, body.clone());
        let bytes = self.call(request, &want, Length::AtMost(JSON_BYTES_MAX)).await?;
        self.parse(&bytes)
    }

    /// Forgets a dataset.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn unregister(&self, name: &DatasetName) -> Result<(), ClientError> {
        let path = routes::dataset(name);
        let want = [StatusCode::OK, StatusCode::NO_CONTENT];
        let request = || self.request(Method::DELETE, &path);
        self.call(request, &want, Length::AtMost(JSON_BYTES_MAX)).await?;
        Ok(())
    }

    /// Begins a warm-up.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn warm_up(&self, what: &StartWarmup) -> Result<Warmup, ClientError> {
        let body = serde_json::to_vec(what).map_err(|e| ClientError::Config(e.to_string()))?;
        let request = || self.json_request(Method::POST, routes::WARMUPS, body.clone());
        let bytes = self.call(request, &[StatusCode::ACCEPTED], Length::AtMost(JSON_BYTES_MAX)).await?;
        self.parse(&bytes)
    }

    /// A warm-up as it is now.
    ///
    /// # Errors
    /// [`ClientError`]; `not_found` when the server has forgotten it.
    pub async fn warmup(&self, id: &str) -> Result<Warmup, ClientError> {
        self.get_json(&routes::warmup(id)).await
    }

    /// Cancels a warm-up.
    ///
    /// # Errors
    /// As [`Client::warmup`].
    pub async fn cancel_warmup(&self, id: &str) -> Result<Warmup, ClientError> {
        self.delete(&routes::warmup(id), StatusCode::ACCEPTED).await
    }

    /// Evicts a dataset's chunks from the server's disk.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn evict(&self, name: &DatasetName) -> Result<Evicted, ClientError> {
        self.delete(&routes::dataset_chunks(name), StatusCode::OK).await
    }

    async fn delete<T: DeserializeOwned>(&self, path: &str, want: StatusCode) -> Result<T, ClientError> {
        let request = || self.request(Method::DELETE, path);
        let bytes = self.call(request, &[want], Length::AtMost(JSON_BYTES_MAX)).await?;
        self.parse(&bytes)
    }
}
