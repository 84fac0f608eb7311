//! The calls that change what a server keeps: registrations, warm-ups and evictions.

use crate::body::BodyLength;
use crate::client::JSON_BYTES_MAX;
use crate::{Client, ClientError};
use fletch_api::{Dataset, Datasets, Evicted, RegisterDataset, StartWarmup, Warmup, routes};
use fletch_core::DatasetName;
use http::{Method, StatusCode};
use serde::de::DeserializeOwned;

impl Client {
    /// Returns all datasets of the caller's domain.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn datasets(&self) -> Result<Vec<Dataset>, ClientError> {
        Ok(self.get_json::<Datasets>(routes::DATASETS).await?.datasets)
    }

    /// Returns one dataset.
    ///
    /// # Errors
    /// [`ClientError`]; `not_found` if the dataset is not registered or the caller may not see it.
    pub async fn dataset(&self, name: &DatasetName) -> Result<Dataset, ClientError> {
        self.get_json(&routes::dataset(name)).await
    }

    /// Registers a dataset. Registering the same dataset again changes nothing.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn register(&self, dataset: &RegisterDataset) -> Result<Dataset, ClientError> {
        let want = [StatusCode::OK, StatusCode::CREATED];
        self.send_json(Method::POST, routes::DATASETS, dataset, &want).await
    }

    /// Deletes the registration of a dataset. The dataset's objects and tables stay at the origin.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn unregister(&self, name: &DatasetName) -> Result<(), ClientError> {
        let path = routes::dataset(name);
        let want = [StatusCode::OK, StatusCode::NO_CONTENT];
        let request = || self.request(Method::DELETE, &path);
        self.call(request, &want, BodyLength::AtMost(JSON_BYTES_MAX)).await?;
        Ok(())
    }

    /// Starts a warm-up.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn warm_up(&self, warmup: &StartWarmup) -> Result<Warmup, ClientError> {
        self.send_json(Method::POST, routes::WARMUPS, warmup, &[StatusCode::ACCEPTED]).await
    }

    /// Returns a warm-up as it is now.
    ///
    /// # Errors
    /// [`ClientError`]; `not_found` if the server no longer remembers the warm-up.
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
        let bytes = self.call(request, &[want], BodyLength::AtMost(JSON_BYTES_MAX)).await?;
        self.parse(&bytes)
    }
}
