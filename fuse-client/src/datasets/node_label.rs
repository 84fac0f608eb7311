//! The label `fletch/mounts=ready` of this node in Kubernetes, by which pods select nodes with datasets.
//!
//! ```text
//! each second: do all ready files exist? ─▶ not what the API server took last, or long ago ─▶ PATCH
//! ```
//! 1. The label is set only while all of [`NodeLabelSettings::when`] exist. One container of a pod serves one
//!    domain, and all of them set the same label by the same files.
//! 2. The token and the CA are read again for each call: Kubernetes replaces both.
//! 3. A call that fails is made again, and changes nothing for the mounts.

use anyhow::{Context, Result, anyhow};
use fletch_client::{HttpClient, TlsOptions};
use fletch_host::files::read_small;
use reqwest::{Url, header::CONTENT_TYPE};
use serde_json::json;
use std::{
    net::IpAddr,
    path::PathBuf,
    sync::atomic::{AtomicBool, Ordering::Relaxed},
    time::Duration,
};
use tokio::{
    sync::Mutex,
    task::spawn_blocking,
    time::{Instant, sleep, timeout},
};

/// The label's key and its value.
const LABEL: (&str, &str) = ("fletch/mounts", "ready");
/// Where Kubernetes puts the token of a pod's service account, and the CA of the API server.
pub const ACCOUNT_DIR: &str = "/var/run/secrets/kubernetes.io/serviceaccount";
/// The time between two looks at the files.
const LOOK_EVERY: Duration = Duration::from_secs(1);
/// The label is sent again after this time: a node that was registered anew has lost it.
const SEND_AGAIN_AFTER: Duration = Duration::from_secs(300);
/// How long one call may take, and the last one: the process is about to end.
const CALL_WITHIN: Duration = Duration::from_secs(10);
const LAST_CALL_WITHIN: Duration = Duration::from_secs(2);
/// The pause after a failed call is twice as long, and doubles with each further one.
const PAUSE_MIN: Duration = Duration::from_secs(1);
const PAUSE_MAX: Duration = Duration::from_secs(60);
/// The bytes of a refusal that a log line shows.
const REFUSAL_BYTES_MAX: usize = 500;

/// Which node to label, and when.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NodeLabelSettings {
    /// The name of the node.
    pub node: String,
    /// The label is set while all of these files exist.
    pub when: Vec<PathBuf>,
    /// The directory with the files `token` and `ca.crt`.
    pub account: PathBuf,
}

/// What the API server took last, and when.
type Sent = Option<(bool, Instant)>;

/// The label of this node.
pub struct NodeLabel {
    settings: NodeLabelSettings,
    url: Url,
    /// Held during a call, so that an earlier value never arrives after a later one.
    sent: Mutex<Sent>,
    is_set: AtomicBool,
}

impl NodeLabel {
    /// Returns the label of a node. `host` and `port` are those of the API server: Kubernetes tells each pod.
    ///
    /// # Errors
    /// There is no API server.
    pub fn new(settings: NodeLabelSettings, host: Option<String>, port: Option<String>) -> Result<Self> {
        let (Some(host), Some(port)) = (host, port) else {
            return Err(anyhow!(
                "--label-node works in a pod: KUBERNETES_SERVICE_HOST or KUBERNETES_SERVICE_PORT is not set"
            ));
        };
        let host = if let Ok(IpAddr::V6(ip)) = host.parse() { format!("[{ip}]") } else { host };
        let mut url: Url = format!("https://{host}:{port}/api/v1/nodes")
            .parse()
            .with_context(|| format!("the API server of Kubernetes is at {host}:{port}"))?;
        url.path_segments_mut().map_err(|()| anyhow!("{host}:{port} is no host"))?.push(&settings.node);
        url.query_pairs_mut().append_pair("fieldManager", "fletch-mount");
        Ok(NodeLabel { settings, url, sent: Mutex::new(None), is_set: AtomicBool::new(false) })
    }

    /// Whether the API server has the label from this process.
    #[must_use]
    pub fn is_set(&self) -> bool {
        self.is_set.load(Relaxed)
    }

    /// Sets the label and takes it away, as the files say, until the task is dropped.
    pub async fn run(&self) {
        let mut failures = 0_u32;
        loop {
            let pause = match self.send_changes().await {
                Ok(()) => {
                    failures = 0;
                    LOOK_EVERY
                }
                Err(error) => {
                    if failures == 0 {
                        let (node, error) = (&self.settings.node, format!("{error:#}"));
                        tracing::warn!(node, error, "the node's label is not up to date: trying again");
                    }
                    failures += 1;
                    PAUSE_MIN.saturating_mul(1 << failures.min(6)).min(PAUSE_MAX)
                }
            };
            sleep(pause).await;
        }
    }

    /// Sends the label a last time, after the ready file of this process is gone.
    pub async fn end(&self) {
        let ended = timeout(LAST_CALL_WITHIN, self.send_changes()).await;
        if let Err(error) = ended.unwrap_or_else(|_| Err(anyhow!("no answer within {LAST_CALL_WITHIN:?}"))) {
            let (node, error) = (&self.settings.node, format!("{error:#}"));
            tracing::warn!(node, error, "the node keeps its label: new pods may wait there for datasets");
        }
    }

    async fn send_changes(&self) -> Result<()> {
        let mut sent = self.sent.lock().await;
        let is_ready = self.settings.when.iter().all(|file| file.exists());
        let is_known =
            |(was_ready, at): (bool, Instant)| was_ready == is_ready && at.elapsed() < SEND_AGAIN_AFTER;
        if sent.is_some_and(is_known) {
            return Ok(());
        }
        let before = sent.take();
        self.patch(is_ready).await?;
        *sent = Some((is_ready, Instant::now()));
        self.is_set.store(is_ready, Relaxed);
        if before.is_none_or(|(was_ready, _)| was_ready != is_ready) {
            tracing::info!(node = self.settings.node, is_ready, "the node has its label up to date");
        }
        Ok(())
    }

    async fn patch(&self, is_ready: bool) -> Result<()> {
        let account = self.settings.account.clone();
        let (token, http) = spawn_blocking(move || {
            let token = read_small(&account.join("token")).context("the token of the service account")?;
            let files = TlsOptions { ca_file: Some(account.join("ca.crt")), ..TlsOptions::default() };
            let settings = || {
                let http = reqwest::Client::builder().no_proxy().timeout(CALL_WITHIN);
                http.redirect(reqwest::redirect::Policy::none())
            };
            let token = String::from_utf8(token).context("the token of the service account")?;
            anyhow::Ok((token, HttpClient::new(files, Box::new(settings))?.current()))
        })
        .await??;
        let value = is_ready.then_some(LABEL.1);
        let labels = json!({ "metadata": { "labels": { LABEL.0: value } } });
        let call = http.patch(self.url.clone()).bearer_auth(token.trim());
        let call = call.header(CONTENT_TYPE, "application/merge-patch+json").body(labels.to_string());
        let mut answer = call.send().await?;
        let status = answer.status();
        if status.is_success() {
            return Ok(());
        }
        let said = answer.chunk().await.ok().flatten().unwrap_or_default();
        let said = String::from_utf8_lossy(&said[..said.len().min(REFUSAL_BYTES_MAX)]).into_owned();
        Err(anyhow!("the API server of Kubernetes answered {status}: {said}"))
    }
}

#[cfg(test)]
mod tests;
