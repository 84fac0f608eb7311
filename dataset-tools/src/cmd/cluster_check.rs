//! `fletch cluster check`: asks each server of a cluster what it says of itself, and compares the answers.

use super::Context;
use super::doctor::finding::{Finding, Report};
use crate::failure::{Exit, Failure};
use crate::status::text_table::{Align, TextTable};
use fletch_api::cluster::MemberCheck;
use fletch_client::CheckedMember;
use serde::Serialize;
use std::collections::BTreeMap;
use std::time::{Duration, UNIX_EPOCH};

/// The largest difference of two clocks that is no finding, in seconds: an answer may take that long.
const CLOCKS_MAX: f64 = 2.0;
/// The most servers in the table.
const ROWS_MAX: usize = 1000;

/// The names of the checks.
const ANSWER: &str = "answer";
const ETCD: &str = "etcd";
const PEERS: &str = "peers";
const REFUSALS: &str = "refusals";
const DISK: &str = "disk";
const CLOCK: &str = "clock";
const BUILD: &str = "build";
const SETTINGS: &str = "settings";

#[derive(Serialize)]
struct Document<'a> {
    servers: Vec<&'a MemberCheck>,
    #[serde(flatten)]
    report: Report,
}

pub fn run(ctx: &Context) -> Result<Exit, Failure> {
    let (client, _) = ctx.reached()?;
    let members = ctx.rt.block_on(client.check_members())?;
    let report = compare(&members);
    let exit = report.exit();
    let servers = members.iter().filter_map(|m| m.check.as_ref().ok()).collect();
    let document = Document { servers, report };
    ctx.out.result(&document, |w| {
        w.write_all(table(&members).render(ROWS_MAX).as_bytes())?;
        document.report.write(w)
    })?;
    Ok(exit)
}

/// Returns a row for each server.
fn table(members: &[CheckedMember]) -> TextTable {
    use Align::{Left, Right};
    let mut table = TextTable::new(&[
        ("SERVER", Left),
        ("BUILD", Left),
        ("VIEW", Right),
        ("REVISION", Right),
        ("ETCD", Left),
        ("DISK", Left),
        ("CLOCK", Right),
        ("PEERS", Right),
        ("URL", Left),
    ]);
    for member in members {
        let cells = match &member.check {
            Ok(check) => {
                let answer = check.peers.iter().filter(|peer| peer.problem.is_none()).count();
                [
                    check.build.clone(),
                    check.view.to_string(),
                    check.revision.map_or_else(|| "-".to_owned(), |revision| revision.to_string()),
                    if check.etcd_up { "up" } else { "away" }.to_owned(),
                    check.disk.clone().unwrap_or_else(|| "none".to_owned()),
                    format!("{:+.1} s", ahead(member, check)),
                    format!("{answer} of {}", check.peers.len()),
                ]
            }
            Err(_) => std::array::from_fn(|_| "?".to_owned()),
        };
        table.push([member.id.clone()].into_iter().chain(cells).chain([member.url.clone()]));
    }
    table
}

/// Returns what is wrong with the servers, or differs between them.
fn compare(members: &[CheckedMember]) -> Report {
    let mut report = Report::default();
    let checks: Vec<&MemberCheck> = members.iter().filter_map(|m| m.check.as_ref().ok()).collect();
    report.add(&[ANSWER], members.iter().filter_map(silence).collect());
    report.add(&[ETCD], checks.iter().filter_map(|check| away(check)).collect());
    report.add(&[PEERS], checks.iter().flat_map(|check| deaf(check)).collect());
    report.add(&[REFUSALS], checks.iter().flat_map(|check| refusals(check)).collect());
    report.add(&[DISK], checks.iter().filter_map(|check| bad_disk(check)).collect());
    report.add(&[CLOCK], clocks(members).into_iter().collect());
    report.add(&[BUILD], builds(&checks));
    report.add(&[SETTINGS], settings(&checks));
    report
}

fn silence(member: &CheckedMember) -> Option<Finding> {
    let CheckedMember { id, url, check, .. } = member;
    match check {
        Ok(check) if check.id == *id => None,
        Ok(check) => {
            let what = format!("{id} at {url} cannot be asked from here: {} answers", check.id);
            Some(Finding::error(ANSWER, what, "name the servers by URL (--server), or run this at a server"))
        }
        Err(e) if e.is_denied() => {
            let fix = "give the token of an admin; if others take it, wait until the tokens file of this \
                       server is the same";
            Some(Finding::error(ANSWER, format!("{id} refuses the token: {e}"), fix))
        }
        Err(e) => Some(Finding::error(ANSWER, format!("{id} is away: {e}"), "start it, or drain it")),
    }
}

fn away(check: &MemberCheck) -> Option<Finding> {
    let fix = "check cluster.endpoints of this server, and that etcd runs and can be reached";
    match &check.not_ready {
        Some(why) => Some(Finding::error(ETCD, format!("{} is not ready: {why}", check.id), fix)),
        None if !check.etcd_up => {
            Some(Finding::error(ETCD, format!("{} does not reach etcd", check.id), fix))
        }
        None => None,
    }
}

fn deaf(check: &MemberCheck) -> Vec<Finding> {
    let problems = check.peers.iter().filter_map(|peer| Some((peer, peer.problem.as_ref()?)));
    let finding = |(peer, problem): (&fletch_api::cluster::PeerCheck, &String)| {
        let what = format!("{} gets no answer of {}: {problem}", check.id, peer.id);
        let fix = "compare the peer tokens, the certificates and the URLs (cluster.peer_token_file, \
                   cluster.peer_url) of the two, and the network between them";
        Finding::error(PEERS, what, fix)
    };
    problems.map(finding).collect()
}

fn refusals(check: &MemberCheck) -> Vec<Finding> {
    let finding = |problem: &String| {
        let fix = "the server's log has the first warning; fletch_peer_refusals_total counts refusals";
        Finding::error(REFUSALS, format!("{} says: {problem}", check.id), fix)
    };
    check.problems.iter().map(finding).collect()
}

fn bad_disk(check: &MemberCheck) -> Option<Finding> {
    let state = check.disk.as_ref().filter(|state| *state != "on")?;
    let what = format!("the disk cache of {} is {state}", check.id);
    Some(Finding::warning(DISK, what, "`fletch status` at that server says why"))
}

/// Returns by how many seconds the clock of a server is ahead of this machine's.
fn ahead(member: &CheckedMember, check: &MemberCheck) -> f64 {
    let answered = member.answered.duration_since(UNIX_EPOCH).unwrap_or_default();
    Duration::from_nanos(check.now_ns).as_secs_f64() - answered.as_secs_f64()
}

fn clocks(members: &[CheckedMember]) -> Option<Finding> {
    let mut clocks: Vec<(f64, &str)> = members
        .iter()
        .filter_map(|member| Some((ahead(member, member.check.as_ref().ok()?), member.id.as_str())))
        .collect();
    clocks.sort_by(|a, b| a.0.total_cmp(&b.0));
    let ((slow, behind), (fast, before)) = (*clocks.first()?, *clocks.last()?);
    if fast - slow <= CLOCKS_MAX {
        return None;
    }
    let what = format!("the clock of {before} is {:.0} s ahead of {behind}'s", fast - slow);
    Some(Finding::warning(CLOCK, what, "synchronise the clocks (chrony, systemd-timesyncd)"))
}

fn builds(checks: &[&MemberCheck]) -> Vec<Finding> {
    let mut all = Vec::new();
    if let Some(text) = groups(checks.iter().map(|check| (check, &check.build))) {
        all.push(Finding::warning(BUILD, format!("builds differ: {text}"), "end the rolling upgrade"));
    }
    let protocols: Vec<_> = checks.iter().map(|check| (check, check.peer_protocol.to_string())).collect();
    if let Some(text) = groups(protocols.iter().map(|(check, protocol)| (*check, protocol))) {
        let what = format!("the protocols of servers differ, so they read nothing from each other: {text}");
        all.push(Finding::error(BUILD, what, "use builds of one release"));
    }
    all
}

fn settings(checks: &[&MemberCheck]) -> Vec<Finding> {
    let mut keys: BTreeMap<&String, Vec<(&&MemberCheck, &String)>> = BTreeMap::new();
    for check in checks {
        for (key, hash) in &check.settings {
            keys.entry(key).or_default().push((check, hash));
        }
    }
    let differ = keys.into_iter().filter_map(|(key, hashes)| Some((key, groups(hashes.into_iter())?)));
    let finding = |(key, text): (&String, String)| {
        let fix = "give all servers the same settings; `fletch-server config show` prints those in force";
        Finding::warning(SETTINGS, format!("{key} differs: {text}"), fix)
    };
    differ.map(finding).collect()
}

/// Returns which servers have which value, or `None` if all have the same.
fn groups<'a>(values: impl Iterator<Item = (&'a &'a MemberCheck, &'a String)>) -> Option<String> {
    let mut by_value: BTreeMap<&String, Vec<&str>> = BTreeMap::new();
    for (check, value) in values {
        by_value.entry(value).or_default().push(&check.id);
    }
    if by_value.len() < 2 {
        return None;
    }
    let parts: Vec<String> =
        by_value.into_iter().map(|(value, ids)| format!("{} ({value})", ids.join(", "))).collect();
    Some(parts.join("; "))
}

#[cfg(test)]
mod tests {
    use super::*;
    use fletch_api::cluster::PeerCheck;

    /// A part of the text, and the change that causes it.
    type Case = (&'static str, fn(&mut MemberCheck));

    fn member(id: &str, change: impl FnOnce(&mut MemberCheck)) -> CheckedMember {
        let mut check = MemberCheck {
            id: id.to_owned(),
            build: "0.1.0".to_owned(),
            peer_protocol: 1,
            view: 7,
            revision: Some(12),
            now_ns: 1_000_000_000_000,
            etcd_up: true,
            not_ready: None,
            disk: Some("on".to_owned()),
            settings: BTreeMap::from([("limits.jobs".to_owned(), "aa".to_owned())]),
            peers: vec![PeerCheck { id: "z".to_owned(), problem: None }],
            problems: Vec::new(),
        };
        change(&mut check);
        let answered = UNIX_EPOCH + Duration::from_secs(1000);
        CheckedMember { id: id.to_owned(), url: format!("http://{id}"), check: Ok(check), answered }
    }

    fn text(members: &[CheckedMember]) -> (Exit, String) {
        let report = compare(members);
        let mut out = Vec::new();
        report.write(&mut out).expect("memory");
        (report.exit(), String::from_utf8(out).expect("text"))
    }

    #[test]
    fn equal_servers_are_healthy() {
        let (exit, text) = text(&[member("a", |_| {}), member("b", |_| {})]);
        assert_eq!((exit, text.as_str()), (Exit::Ok, "8 checks: healthy\n"));
    }

    #[test]
    fn what_differs_is_a_warning_and_what_fails_an_error() {
        let setting =
            |c: &mut MemberCheck| drop(c.settings.insert("limits.jobs".to_owned(), "bb".to_owned()));
        let differ: [Case; 3] = [
            ("clock of b is 6 s ahead of a's", |c| c.now_ns += 6_000_000_000),
            ("builds differ: a (0.1.0); b (0.2.0)", |c| c.build = "0.2.0".to_owned()),
            ("disk cache of b is full", |c| c.disk = Some("full".to_owned())),
        ];
        for (want, change) in differ {
            let (exit, text) = text(&[member("a", |_| {}), member("b", change)]);
            assert!(exit == Exit::Partial && text.contains(want), "{want}: {text}");
        }
        let (exit, said) = text(&[member("a", |_| {}), member("b", setting), member("c", |_| {})]);
        assert!(exit == Exit::Partial && said.contains("limits.jobs differs: a, c (aa); b (bb)"), "{said}");
        let fail: [Case; 5] = [
            ("b says: z (token): it answered 401", |c| {
                c.problems = vec!["z (token): it answered 401".to_owned()];
            }),
            ("b does not reach etcd", |c| c.etcd_up = false),
            ("b is not ready: no view", |c| c.not_ready = Some("no view".to_owned())),
            ("b gets no answer of z: it answered 401", |c| {
                c.peers[0].problem = Some("it answered 401".to_owned());
            }),
            ("so they read nothing from each other: a (1); b (2)", |c| c.peer_protocol = 2),
        ];
        for (want, change) in fail {
            let (exit, text) = text(&[member("a", |_| {}), member("b", change)]);
            assert!(exit == Exit::Failed && text.contains(want), "{want}: {text}");
        }
        let other = CheckedMember { id: "c".to_owned(), ..member("a", |_| {}) };
        let (exit, said) = text(&[other]);
        assert!(exit == Exit::Failed && said.contains("cannot be asked from here: a answers"), "{said}");
    }
}
