//! Takes the samples of the last hour.

use super::{jobs::readings, unix_ns};
use crate::{
    admin::dashboard::{Counts, DatasetOf, Now, Sample, Totals},
    app::server::Server,
};
use std::{collections::BTreeMap, sync::atomic::Ordering::Relaxed, time::SystemTime};

/// Takes a sample of what the server counted, and of what each job does. Blocking.
pub fn sample(server: &Server) {
    let at_ns = unix_ns(SystemTime::now());
    let (mut all, mut domains) = (Totals::default(), BTreeMap::new());
    server.dashboard.measure_host(server.state_dir());
    let mut datasets: BTreeMap<DatasetOf, Totals> = BTreeMap::new();
    for ((domain, dataset), bytes) in server.accounts.costs.datasets() {
        let more = Totals { delivered: bytes.delivered, origin: bytes.read, avoided: bytes.avoided };
        all.add(more);
        domains.entry(domain.clone()).or_insert_with(Totals::default).add(more);
        datasets.insert((domain, dataset), more);
    }
    server.dashboard.history().push_datasets(at_ns, datasets);
    server.dashboard.history().push(Sample { at_ns, all, domains, counts: counts(server) });
    let now = Now { mono_ns: server.now_ns(), unix_ns: at_ns };
    let readings = readings(server);
    server.dashboard.watches().observe(now, &readings);
}

fn counts(server: &Server) -> Counts {
    let (requests, errors) = server.requests.sums();
    let epochs = &server.registry.context.counts;
    let origins = server.versions.origins().stats();
    let wrong = &server.versions.corruption;
    let origin = [&wrong.changed, &wrong.corrupt, &wrong.missing, &wrong.tables];
    let report = server.store.disk().map(|d| d.report());
    let disk = report.as_ref().and_then(|r| r.engine.as_ref()).map(|e| e.counts).unwrap_or_default();
    Counts {
        requests,
        errors,
        corrupt: server.store.stats().corrupt
            + report.as_ref().map_or(0, |r| r.damaged())
            + origin.iter().map(|n| n.load(Relaxed)).sum::<u64>(),
        late_acks: epochs.late_acks.load(Relaxed),
        abandoned: epochs.abandoned.load(Relaxed),
        damaged_epochs: epochs.damaged.load(Relaxed),
        pauses: origins.pauses,
        throttled: origins.throttled,
        disk_errors: disk.errors,
        quarantined: disk.quarantined,
        evicted_bytes: disk.evicted_bytes,
        put_bytes: disk.put_bytes,
    }
}
