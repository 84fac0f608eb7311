//! `fletch cluster`: shows the servers of a cluster, compares them, drains one, and recovers their etcd.

use super::Context;
use crate::cli::ClusterCommand;
use crate::failure::{Exit, Failure};
use fletch_api::{Cluster, cluster::Recovery};
use fletch_core::MemberId;
use std::io::{self, Write};

pub fn run(ctx: &Context, what: ClusterCommand) -> Result<Exit, Failure> {
    if let ClusterCommand::Check = what {
        return super::cluster_check::run(ctx);
    }
    let (client, server) = ctx.reached()?;
    if client.servers().is_list() {
        ctx.out.note(format_args!("{server} answers"));
    }
    let cluster = match what {
        ClusterCommand::Check | ClusterCommand::Status => ctx.rt.block_on(client.cluster())?,
        ClusterCommand::Recover { dry_run, without_silent, datasets_from } => {
            let from = datasets_from.map(|id| MemberId::new(&id)).transpose();
            let from = from.map_err(|e| Failure::usage(e.to_string()))?;
            let call = client.recover_cluster(dry_run, without_silent, from.as_ref());
            let recovery = ctx.rt.block_on(call)?;
            ctx.out.result(&recovery, |w| write_recovery(w, &recovery))?;
            return Ok(if recovery.silent.is_empty() { Exit::Ok } else { Exit::Partial });
        }
        ClusterCommand::Drain { id } => {
            let id = MemberId::new(&id).map_err(|e| Failure::usage(e.to_string()))?;
            ctx.rt.block_on(client.drain_member(&id))?
        }
    };
    ctx.out.result(&cluster, |w| write_view(w, &cluster))?;
    Ok(Exit::Ok)
}

fn write_recovery(w: &mut dyn Write, recovery: &Recovery) -> io::Result<()> {
    let done = if recovery.is_done { "written back to etcd" } else { "to be written back (--dry-run)" };
    writeln!(w, "cluster\t{}\t{done}", recovery.uid)?;
    let Recovery { members, datasets, jobs, silent, .. } = recovery;
    let all = [("member", members), ("dataset", datasets), ("job", jobs), ("left out", silent)];
    for (word, names) in all {
        for name in names {
            writeln!(w, "{word}\t{name}")?;
        }
    }
    writeln!(w, "datasets are those of {}", recovery.datasets_from)
}

fn write_view(w: &mut dyn Write, cluster: &Cluster) -> io::Result<()> {
    writeln!(w, "view\t{}", cluster.view)?;
    let sum: u64 = cluster.members.iter().map(|m| u64::from(m.weight)).sum();
    for m in &cluster.members {
        let state = m.state.map_or(if m.up { "up" } else { "down" }, |state| state.as_str());
        let part = if sum == 0 { 0.0 } else { f64::from(m.weight) * 100.0 / sum as f64 };
        write!(w, "{}\t{state}\t{part:.0} % of the chunks\t{}", m.id, m.url)?;
        match &m.zone {
            Some(zone) => writeln!(w, "\tzone {zone}")?,
            None => writeln!(w)?,
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_recovery_names_everything_that_it_writes() {
        let text = r#"{"uid":"7f","is_done":false,"datasets_from":"a","datasets":["default/set"],
            "jobs":["train (0a)"],"members":["a","b"],"silent":["c: it did not answer in time"]}"#;
        let recovery: Recovery = serde_json::from_str(text).expect("a recovery");
        let mut out = Vec::new();
        write_recovery(&mut out, &recovery).expect("memory");
        assert_eq!(
            String::from_utf8(out).expect("text"),
            "cluster\t7f\tto be written back (--dry-run)\nmember\ta\nmember\tb\ndataset\tdefault/set\n\
             job\ttrain (0a)\nleft out\tc: it did not answer in time\ndatasets are those of a\n"
        );
    }

    #[test]
    fn a_view_has_a_line_for_each_member() {
        let text = r#"{"view":7,"members":[
            {"id":"a","url":"http://a","weight":300,"zone":"z1","up":true,"state":"up"},
            {"id":"b","url":"http://b","weight":100,"up":false,"state":"restarting"},
            {"id":"c","url":"http://c","weight":0}]}"#;
        let cluster: Cluster = serde_json::from_str(text).expect("a view");
        let mut out = Vec::new();
        write_view(&mut out, &cluster).expect("memory");
        assert_eq!(
            String::from_utf8(out).expect("text"),
            "view\t7\na\tup\t75 % of the chunks\thttp://a\tzone z1\n\
             b\trestarting\t25 % of the chunks\thttp://b\nc\tup\t0 % of the chunks\thttp://c\n"
        );
    }
}
