//! Tests plans that come from a selection file.

use crate::common::{Node, epochs::*};
use fletch_api::{Code, OrderKind, PlanBase, StartJob, WeightOf, Weights};
use fletch_client::selection::{Columns, Selection};
use fletch_core::plan::Tail;
use std::{
    collections::{BTreeMap, BTreeSet},
    path::Path,
};

fn selected(name: &str, base: PlanBase) -> StartJob {
    let mut ask = ask(name, OrderKind::Substitute, world(1, 4, Tail::Keep));
    ask.plan.base = base;
    ask
}

fn read(file: &Path, weights: Option<&str>, draws: Option<u64>) -> PlanBase {
    let columns = Columns { weights: weights.map(str::to_owned), ..Columns::default() };
    Selection::read(file, &columns).expect("a selection").base(draws)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_selection_of_a_tenth_is_delivered_exactly() {
    let tree = tree(198);
    tree.index();
    let node = Node::serving(&tree, &[]).await;
    let client = client(&node);
    let keys: Vec<String> = (0..20).map(|i| format!("f{:04}", i * 37 % 198)).collect();
    let file = tree.path("selection.csv");
    let rows = keys.iter().enumerate().map(|(i, k)| format!("{k},{},x\n", i % 3));
    std::fs::write(&file, format!("key,w,other\n{}", rows.collect::<String>())).expect("write");
    let job = client.declare(&selected("keys", read(&file, None, None))).await.expect("declared");
    assert_eq!((job.info().samples, job.info().entries), (200, 20));
    for epoch in 0..2 {
        let mut got = BTreeSet::new();
        let mut all = fletch_client::epochs::ReceivedSum::new(job.info().root);
        while let Some(b) = batch(&job, epoch, 0, 4).await {
            ack(&job, &b).await;
            for s in &b.samples {
                right(&tree, s);
                all.add(s);
                assert!(got.insert(s.heads[0].path.clone()), "twice");
            }
        }
        assert_eq!(got, keys.iter().cloned().collect());
        assert!(all.agrees(&job.receipt(epoch).await.expect("finished")));
        println!("epoch {epoch}: {} of 200 samples selected, {} delivered, each once", keys.len(), got.len());
    }
    // Weights of some: seven of 0, seven of 1 and six of 2, in 38 draws.
    let job = client.declare(&selected("weights", read(&file, Some("w"), Some(38)))).await.expect("declared");
    let mut drawn: BTreeMap<String, usize> = BTreeMap::new();
    while let Some(b) = batch(&job, 0, 0, 4).await {
        ack(&job, &b).await;
        b.samples.iter().for_each(|s| *drawn.entry(s.heads[0].path.clone()).or_default() += 1);
    }
    let expected = keys.iter().enumerate().filter(|(i, _)| i % 3 > 0);
    assert_eq!(drawn, expected.map(|(i, k)| (k.clone(), i % 3 * 2)).collect());
    // What the version does not have is named, and nothing is declared.
    let refuse = async |base: PlanBase, says: &str| {
        let e = client.declare(&selected("bad", base)).await.expect_err(says);
        assert_eq!(e.code(), Some(Code::BadPlan));
        assert!(e.to_string().contains(says), "{e}");
    };
    let text = |t: &[&str]| t.iter().map(|t| (*t).to_owned()).collect::<Vec<_>>();
    let unknown = text(&["z1", "f0001", "z2", "z3", "z4", "z5", "z6"]);
    let says = r#"6 keys name no sample of the version, among them "z1", "z2", "z3", "z4", "z5""#;
    refuse(PlanBase::Keys(unknown), says).await;
    let weights = |weights: &[f64], of| {
        let weights = weights.iter().copied().map(Some).collect();
        PlanBase::Weights(Weights { weights, draws: 3, of: Some(of) })
    };
    refuse(weights(&[1.0], WeightOf::Keys(text(&["f0001", "f0002"]))), "1 weights for 2 samples").await;
    refuse(weights(&[1.0, 1.0], WeightOf::Samples(vec![3, 3])), "sample 3 has two weights").await;
    refuse(weights(&[1.0], WeightOf::Samples(vec![200])), "the weights name sample 200").await;
    assert_eq!(client.jobs().await.expect("jobs").len(), 2);
    node.running.shutdown().await;
}
