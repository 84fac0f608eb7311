//! The service: whether the user's own server runs while mounts need it, whether it has the credentials for
//! its datasets, and every problem that the server itself sees.

use super::finding::Finding;
use super::{Context, server};
use crate::environment;
use crate::failure::Failure;
use crate::out::{bytes, count};
use crate::own_server::{OwnPaths, records, start};
use fletch_api::dashboard::{DashboardProblem, Severity};
use fletch_client::Client;
use fletch_host::mounts;
use std::collections::BTreeSet;
use std::path::PathBuf;
use std::time::Duration;

pub const OWN_SERVER: &str = "own-server";
pub const CREDENTIALS: &str = "credentials";
pub const PROBLEMS: &str = "problems";

/// Where the runbooks are, one for each alert.
const RUNBOOKS: &str = "https://github.com/fletch-cache/fletch/blob/main/docs/runbooks";
/// The longest time for an answer of the server.
const WITHIN: Duration = Duration::from_secs(3);

#[derive(Debug, Default)]
pub struct Facts {
    /// The mounts of the own server that wait for it. `None`: it runs, or this account has none.
    waiting: Option<Vec<PathBuf>>,
    /// Where the own server keeps its state, and the bytes that are free there, if they are too few.
    full: Option<(PathBuf, u64)>,
    /// The stores for which the own server has no credentials. `None`: another server is asked.
    without_credentials: Option<BTreeSet<String>>,
    /// What the server sees. `None`: none was asked, or it has no time for this question.
    problems: Option<Vec<DashboardProblem>>,
}

impl Facts {
    /// # Errors
    /// The socket of the own server is another user's.
    pub async fn gather(ctx: &Context) -> Result<Self, Failure> {
        let mut facts = Facts::default();
        if let Ok(own) = OwnPaths::of_process()
            && start::running(&own).await?.is_none()
        {
            facts.waiting = Some(mounts_of(&own));
        }
        if let Ok(own) = OwnPaths::of_process() {
            let free = own.state_free().filter(|free| *free < start::STATE_FREE_MIN);
            facts.full = free.map(|free| (own.state, free));
        }
        let Some(client) = server::client(ctx)?.map(|client| client.within(WITHIN).fail_fast()) else {
            return Ok(facts);
        };
        // Whether it answers at all is another check.
        facts.problems = client.dashboard().await.ok().map(|now| now.problems);
        if ctx.chosen()?.is_some_and(|chosen| chosen.is_own()) {
            facts.without_credentials = without_credentials(ctx, &client).await;
        }
        Ok(facts)
    }

    /// Returns the names of the checks that ran.
    pub fn checks(&self) -> Vec<&'static str> {
        let ran = [
            (OWN_SERVER, self.waiting.is_some() || self.full.is_some()),
            (CREDENTIALS, self.without_credentials.is_some()),
            (PROBLEMS, self.problems.is_some()),
        ];
        ran.into_iter().filter(|(_, ran)| *ran).map(|(check, _)| check).collect()
    }

    pub fn findings(&self) -> Vec<Finding> {
        let mut found = Vec::new();
        if let Some(waiting) = self.waiting.as_ref().filter(|waiting| !waiting.is_empty()) {
            let dirs: Vec<String> = waiting.iter().map(|dir| dir.display().to_string()).collect();
            let (n, dirs) = (count(waiting.len() as u64, "mount"), dirs.join(", "));
            let what = format!("your server does not run, and {n} would read from it: {dirs}");
            found.push(Finding::error(OWN_SERVER, what, "start it again: fletch up"));
        }
        if let Some((state, free)) = &self.full {
            let (state, free) = (state.display(), bytes(*free));
            let what = format!("the disk of your server's state, {state}, is full: {free} free");
            let fix = "free some space, or set FLETCH_STATE_DIR to another directory; then fletch up";
            found.push(Finding::error(OWN_SERVER, what, fix));
        }
        for store in self.without_credentials.iter().flatten() {
            found.push(Finding::error(
                CREDENTIALS,
                format!("your server has no credentials for {store}, where a dataset lies"),
                "run `fletch up` in a terminal that has them",
            ));
        }
        found.extend(self.problems.iter().flatten().map(problem));
        found
    }
}

fn problem(seen: &DashboardProblem) -> Finding {
    let finding = match seen.severity {
        Severity::Critical => Finding::error,
        Severity::Warning => Finding::warning,
    };
    let what = format!("the server reports {}: {}: {}", seen.alert.as_str(), seen.subject, seen.detail);
    // The server's own copy is for browsers, and this server may have no port.
    finding(PROBLEMS, what, format!("read {RUNBOOKS}/{}.md", seen.alert.as_str()))
}

/// Returns the directories that still show what the own server served.
fn mounts_of(own: &OwnPaths) -> Vec<PathBuf> {
    let made = records::all(own).into_iter().filter(|made| made.is_own);
    let shows = |made: &records::MadeMount| {
        let mount = mounts::at(&made.dir).ok().flatten();
        mount.is_some_and(|mount| mount.dataset() == Some(made.dataset.as_str()))
    };
    made.filter(shows).map(|made| made.dir).collect()
}

/// Returns the stores of registered datasets for which the own server holds no credentials.
async fn without_credentials(ctx: &Context, client: &Client) -> Option<BTreeSet<String>> {
    let (datasets, held) = (client.datasets().await.ok()?, client.credentials().await.ok()?);
    let stores = datasets.iter().flat_map(|dataset| [&dataset.uri, &dataset.tables]);
    let stores = stores.filter_map(|uri| environment::origin_of(&ctx.registered_uri(uri).ok()?));
    // A plain server need not ask for any.
    let needs = |store: &String| !store.starts_with("http");
    let is_held = |store: &String| held.iter().any(|held| held.origin == *store);
    Some(stores.filter(|store| needs(store) && !is_held(store)).collect())
}

#[cfg(test)]
mod tests {
    use super::super::finding::Severity as Weight;
    use super::*;
    use fletch_api::dashboard::Alert;

    #[test]
    fn each_fault_of_the_service_has_its_finding() {
        assert_eq!(Facts::default().findings(), []);
        assert_eq!(Facts { waiting: Some(Vec::new()), ..Facts::default() }.findings(), []);
        let seen = |severity| DashboardProblem {
            alert: Alert::FletchOriginErrors,
            severity,
            subject: "s3://bucket".to_owned(),
            detail: "12 of 12 calls failed".to_owned(),
            runbook: "/docs/runbooks/FletchOriginErrors".to_owned(),
        };
        let facts = Facts {
            full: Some((PathBuf::from("/state"), 4096)),
            waiting: Some(vec!["/mnt/a".into(), "/mnt/b".into()]),
            without_credentials: Some(BTreeSet::from(["s3://bucket".to_owned()])),
            problems: Some(vec![seen(Severity::Critical), seen(Severity::Warning)]),
        };
        assert_eq!(facts.checks(), [OWN_SERVER, CREDENTIALS, PROBLEMS]);
        let found = facts.findings();
        let weights: Vec<_> = found.iter().map(|f| (f.check, f.severity)).collect();
        let (error, warning) = (Weight::Error, Weight::Warning);
        let wanted = [
            (OWN_SERVER, error),
            (OWN_SERVER, error),
            (CREDENTIALS, error),
            (PROBLEMS, error),
            (PROBLEMS, warning),
        ];
        assert_eq!(weights, wanted);
        assert!(found[0].what.contains("2 mounts") && found[0].fix.contains("fletch up"), "{found:?}");
        assert!(
            found[1].what.contains("/state, is full: 4.00 KiB free")
                && found[3].what.contains("FletchOriginErrors: s3://bucket: 12 of 12"),
            "{found:?}"
        );
        assert!(found[3].fix.ends_with("/docs/runbooks/FletchOriginErrors.md"), "{found:?}");
    }
}
