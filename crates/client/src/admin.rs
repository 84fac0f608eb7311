//! The calls that change what a server keeps: registrations, warm-ups, evictions, mounts and credentials.

use crate::body::BodyLength;
use crate::call::Call;
use crate::client::{JSON_BYTES_MAX, parse, to_json};
use crate::{Client, ClientError};
use fletch_api::cluster::{MemberCheck, Recovery};
use fletch_api::dashboard::{Dashboard, ROWS_MAX};
use fletch_api::s3::{GetS3Credentials, S3Credentials};
use fletch_api::{
    Allocation, AnnounceMount, Cluster, CredentialsList, Dataset, Datasets, Draft, Evicted, GiveCredentials,
    GivenCredentials, LearnedFiles, Member, Mount, Mounts, OriginList, OriginView, RegisterDataset,
    RegisteredDataset, RenewedPins, Sealing, StartWarmup, Tags, Unconfirmed, Warmup, routes,
};
use fletch_core::{DatasetName, Hash, MemberId, MountId, Root, TagName};
use http::{Method, StatusCode};
use serde::de::DeserializeOwned;
use std::time::{Duration, SystemTime};

/// The longest wait for one server of a cluster that is checked. It waits for the others meanwhile.
const CHECK_WITHIN: Duration = Duration::from_secs(5);
/// The longest wait for servers that write the keys of their cluster back, one after the other.
const RECOVER_WITHIN: Duration = Duration::from_secs(600);

/// A server of a cluster, and what it says of itself.
#[derive(Debug)]
pub struct CheckedMember {
    /// Its name.
    pub id: String,
    /// Its URL.
    pub url: String,
    /// What it says of itself.
    pub check: Result<MemberCheck, ClientError>,
    /// When the answer came, by the clock of this machine.
    pub answered: SystemTime,
}

impl Client {
    /// Returns all datasets of the caller's domain.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn datasets(&self) -> Result<Vec<Dataset>, ClientError> {
        let listed = self.get_json::<Datasets>(routes::DATASETS).await?.datasets;
        Ok(listed.into_iter().map(|listed| listed.dataset).collect())
    }

    /// Returns the drafts of the caller's domain that are in use.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn drafts(&self) -> Result<Vec<Draft>, ClientError> {
        Ok(self.get_json::<Datasets>(routes::DATASETS).await?.drafts)
    }

    /// Returns one dataset.
    ///
    /// # Errors
    /// [`ClientError`]; `not_found` if the dataset is not registered or the caller may not see it.
    pub async fn dataset(&self, name: &DatasetName) -> Result<Dataset, ClientError> {
        self.get_json(&routes::dataset(name)).await
    }

    /// Returns at most 1000 tags of a dataset, in the order of their names.
    ///
    /// # Errors
    /// [`ClientError`]; `not_found` if the caller may not see the dataset, or the server is older than this
    /// route.
    pub async fn tags(&self, name: &DatasetName) -> Result<Vec<TagName>, ClientError> {
        Ok(self.get_json::<Tags>(&routes::dataset_tags(name)).await?.tags)
    }

    /// Returns a page of the objects of a dataset that have the indexed bytes under other entity tags.
    ///
    /// # Errors
    /// [`ClientError`]; `not_found` if the caller may not see the dataset, or the server is older than this
    /// route.
    pub async fn renewed_pins(
        &self,
        name: &DatasetName,
        after: Option<&str>,
    ) -> Result<RenewedPins, ClientError> {
        self.get_json(&routes::renewed_pins(name, after)).await
    }

    /// Returns a page of the files of a draft that the server has read whole.
    ///
    /// # Errors
    /// [`ClientError`]; `not_found` if the version is no draft, or the caller may not see it.
    pub async fn learned_files(&self, root: Root, after: u64) -> Result<LearnedFiles, ClientError> {
        self.get_json(&routes::learned(root, after)).await
    }

    /// Begins to seal the draft of a dataset. Returns the sealing that runs already, if one does.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn seal(&self, name: &DatasetName) -> Result<Sealing, ClientError> {
        let want = [StatusCode::OK, StatusCode::ACCEPTED];
        self.send_json(Method::POST, &routes::seal(name), &serde_json::json!({}), &want).await
    }

    /// Returns the last sealing of a dataset.
    ///
    /// # Errors
    /// [`ClientError`]; `not_found` if the server did not seal it since its start.
    pub async fn sealing(&self, name: &DatasetName) -> Result<Sealing, ClientError> {
        self.get_json(&routes::seal(name)).await
    }

    /// Registers a dataset. Registering the same dataset again changes nothing.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn register(&self, dataset: &RegisterDataset) -> Result<RegisteredDataset, ClientError> {
        let want = [StatusCode::OK, StatusCode::CREATED];
        self.send_json(Method::POST, routes::DATASETS, dataset, &want).await
    }

    /// Deletes the registration of a dataset. The dataset's objects and tables stay at the origin.
    ///
    /// Returns the servers of a cluster that did not confirm it, and may still serve the dataset.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn unregister(&self, name: &DatasetName) -> Result<Vec<String>, ClientError> {
        let path = routes::dataset(name);
        let want = [StatusCode::OK, StatusCode::NO_CONTENT];
        let call = Call::new(Method::DELETE, path);
        let (server, body) = self.call_at(&call, &want, BodyLength::AtMost(JSON_BYTES_MAX)).await?;
        if body.is_empty() {
            return Ok(Vec::new());
        }
        Ok(parse::<Unconfirmed>(&server, &body)?.unconfirmed)
    }

    /// Asks each server of the cluster what it says of itself. For admins.
    ///
    /// # Errors
    /// [`ClientError`], if no server answers with the view.
    pub async fn check_members(&self) -> Result<Vec<CheckedMember>, ClientError> {
        let view = self.cluster().await?;
        let one = |url: String| self.at(&url).fail_fast().within(self.io_timeout().min(CHECK_WITHIN));
        let ask = |member: Member| async {
            let check = one(member.url.clone()).get_json(routes::CLUSTER_CHECK).await;
            CheckedMember { id: member.id, url: member.url, check, answered: SystemTime::now() }
        };
        Ok(futures::future::join_all(view.members.into_iter().map(ask)).await)
    }

    /// Takes a member out of the ring of the cluster. Returns the view without it.
    ///
    /// # Errors
    /// [`ClientError`]; `not_found` if the ring has no such member, `conflict` at a server that is alone.
    pub async fn drain_member(&self, id: &MemberId) -> Result<Cluster, ClientError> {
        let path = routes::member_drain(id);
        self.send_json(Method::POST, &path, &serde_json::json!({}), &[StatusCode::OK]).await
    }

    /// Writes the keys of the cluster back to an etcd that lost them. `is_dry`: says what that would write.
    /// `datasets_from`: the member whose datasets count, if the members differ.
    ///
    /// # Errors
    /// [`ClientError`]; `conflict` while etcd has a cluster of this name, or members do not answer.
    pub async fn recover_cluster(
        &self,
        is_dry: bool,
        without_silent: bool,
        datasets_from: Option<&MemberId>,
    ) -> Result<Recovery, ClientError> {
        let from = datasets_from.map(|id| format!("&datasets_from={id}")).unwrap_or_default();
        let path = routes::CLUSTER_RECOVER;
        let path = format!("{path}?dry_run={is_dry}&without_silent={without_silent}{from}");
        let one = self.fail_fast().within(self.io_timeout().max(RECOVER_WITHIN));
        one.send_json(Method::POST, &path, &serde_json::json!({}), &[StatusCode::OK]).await
    }

    /// Returns the origins of registered datasets, whether they work, and their last errors. For admins.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn origins(&self) -> Result<Vec<OriginView>, ClientError> {
        Ok(self.get_json::<OriginList>(routes::ORIGINS).await?.origins)
    }

    /// Returns the division of the disk, as far as the caller may see it.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn allocation(&self) -> Result<Allocation, ClientError> {
        self.get_json(routes::ALLOCATION).await
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

    /// Evicts a dataset's chunks from the disks of all servers of the cluster.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn evict(&self, name: &DatasetName) -> Result<Evicted, ClientError> {
        self.delete(&routes::dataset_chunks(name), StatusCode::OK).await
    }

    /// Removes chunks from the disks and the memory of all servers of the cluster, at most 64.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn erase(&self, name: &DatasetName, chunks: &[Hash]) -> Result<Evicted, ClientError> {
        let chunks = chunks.iter().map(ToString::to_string).collect::<Vec<_>>().join(",");
        let path = format!("{}?chunks={chunks}", routes::dataset_chunks(name));
        self.delete(&path, StatusCode::OK).await
    }

    /// Announces a mount. The server forgets it 30 s after its last announcement.
    ///
    /// # Errors
    /// [`ClientError`]; `not_found` from a server that is older than this route.
    pub async fn announce_mount(&self, id: &MountId, mount: &AnnounceMount) -> Result<(), ClientError> {
        let call = Call::new(Method::PUT, routes::mount(id)).json(to_json(mount)?);
        self.call(&call, &[StatusCode::NO_CONTENT], BodyLength::AtMost(JSON_BYTES_MAX)).await?;
        Ok(())
    }

    /// Tells the server that a mount ended.
    ///
    /// # Errors
    /// As [`Client::announce_mount`].
    pub async fn forget_mount(&self, id: &MountId) -> Result<(), ClientError> {
        let path = routes::mount(id);
        let call = Call::new(Method::DELETE, path);
        self.call(&call, &[StatusCode::NO_CONTENT], BodyLength::AtMost(JSON_BYTES_MAX)).await?;
        Ok(())
    }

    /// Returns the mounts that the caller may see.
    ///
    /// # Errors
    /// As [`Client::announce_mount`].
    pub async fn mounts(&self) -> Result<Vec<Mount>, ClientError> {
        Ok(self.get_json::<Mounts>(routes::MOUNTS).await?.mounts)
    }

    /// As [`Client::mounts`] at all servers of the cluster, with the ids of those that did not answer.
    ///
    /// # Errors
    /// [`ClientError`], if no server answers.
    pub async fn mounts_of_all(&self) -> Result<(Vec<Mount>, Vec<String>), ClientError> {
        let (lists, silent) = self.of_all::<Mounts>(routes::MOUNTS).await?;
        Ok((lists.into_iter().flat_map(|list| list.mounts).collect(), silent))
    }

    /// Gives the server credentials for an origin, in place of older ones. It keeps them in memory only.
    ///
    /// # Errors
    /// [`ClientError`]; `forbidden` unless the server is the caller's own and is asked on its socket,
    /// `conflict` if its settings name the origin, `not_found` from a server that is older than this route.
    pub async fn give_credentials(&self, given: &GiveCredentials) -> Result<GivenCredentials, ClientError> {
        self.send_json(Method::PUT, routes::CREDENTIALS, given, &[StatusCode::OK]).await
    }

    /// Derives credentials for the server's S3 door from this client's token. `ttl`: how long they are valid;
    /// `None`: 12 hours.
    ///
    /// # Errors
    /// [`ClientError`]; `not_found` from a server without an S3 door, or one that is older than this route.
    pub async fn s3_credentials(&self, ttl: Option<Duration>) -> Result<S3Credentials, ClientError> {
        let asked = GetS3Credentials { ttl_s: ttl.map(|ttl| ttl.as_secs()) };
        self.send_json(Method::POST, routes::S3_CREDENTIALS, &asked, &[StatusCode::OK]).await
    }

    /// Returns what the admin page shows of the server, with as many rows as there are at most.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn dashboard(&self) -> Result<Dashboard, ClientError> {
        self.get_json(&format!("{}?rows={ROWS_MAX}", routes::DASHBOARD)).await
    }

    /// Returns the credentials that the server holds, without secrets.
    ///
    /// # Errors
    /// [`ClientError`]; `forbidden` for all but admins.
    pub async fn credentials(&self) -> Result<Vec<GivenCredentials>, ClientError> {
        Ok(self.get_json::<CredentialsList>(routes::CREDENTIALS).await?.credentials)
    }

    async fn delete<T: DeserializeOwned>(&self, path: &str, want: StatusCode) -> Result<T, ClientError> {
        let call = Call::new(Method::DELETE, path);
        self.json(&call, &[want]).await.map(|answer| answer.1)
    }
}
