package pool

import (
	"context"
	"errors"
	"fmt"
	"testing"

	"github.com/go-logr/logr/testr"
	"github.com/google/go-cmp/cmp"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/utils/ptr"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
)

// supplies is what DevicePools have of their VFs, by name.
type supplies map[string]Supply

func (s supplies) Supply(devicePool string) (Supply, bool) {
	supply, known := s[devicePool]
	return supply, known
}

// undeclared is a node whose DevicePools cannot be read, or that is gone.
type undeclared struct {
	*node
	err, nodeErr error
}

func (u undeclared) DevicePools(context.Context) ([]v1alpha1.DevicePool, error) { return nil, u.err }

func (u undeclared) NodeLabels(context.Context) (map[string]string, error) { return nil, u.nodeErr }

// TestReporterErrors: what cannot be read is an error, so that it is tried again; nothing is told of a Node that is gone.
func TestReporterErrors(t *testing.T) {
	n := &node{writeErrs: map[string]error{}}
	tracker := NewTracker(n, n, nil, testr.New(t))
	ctx, cancel := context.WithCancel(t.Context())
	if err := tracker.Run(ctx, nil, cancel); err != nil {
		t.Fatal(err)
	}
	away := errors.New("the API server is away")
	for name, test := range map[string]struct{ err, nodeErr, want error }{
		"DevicePools":       {away, nil, away},
		"the Node is gone":  {away, apierrors.NewNotFound(schema.GroupResource{}, "node1"), nil},
		"the Node, for now": {away, errors.New("not known yet"), away},
	} {
		reporter := &Reporter{Node: "node1", Tracker: tracker, API: undeclared{n, test.err, test.nodeErr}, Log: testr.New(t)}
		if err := reporter.write(t.Context()); !errors.Is(err, test.want) || (test.want == nil) != (err == nil) {
			t.Errorf("%s: error %v, want %v", name, err, test.want)
		}
	}
}

// TestReporterSupply: what a pool lacks is told, and nothing is told of a pool before that is known: what the last run
// of the agent wrote would come and go with each start.
func TestReporterSupply(t *testing.T) {
	made := devicePool("made", v1alpha1.FunctionSelector{PFNames: []string{"ens9"}})
	made.Spec.NumVFs, made.Generation = ptr.To[int32](4), 2
	busy := v1alpha1.Shortage{PF: "0000:3b:00.0", Reason: v1alpha1.ReasonBusy}
	before := []v1alpha1.DevicePoolNodeStatus{{Name: "node1", Shortages: []v1alpha1.Shortage{busy}}}
	made.Status.Nodes = before
	n := &node{devicePools: []v1alpha1.DevicePool{made}, writeErrs: map[string]error{}}
	tracker := NewTracker(n, n, nil, testr.New(t))
	ctx, cancel := context.WithCancel(t.Context())
	if err := tracker.Run(ctx, nil, cancel); err != nil {
		t.Fatal(err)
	}
	vfs := supplies{}
	reporter := &Reporter{Node: "node1", Tracker: tracker, API: n, Supply: vfs.Supply, Log: testr.New(t)}
	write := func(writes int, want []v1alpha1.DevicePoolNodeStatus) {
		t.Helper()
		if err := reporter.write(t.Context()); err != nil {
			t.Fatal(err)
		}
		if got := n.takeWrites(); len(got) != writes {
			t.Errorf("%d writes, want %d", len(got), writes)
		}
		if diff := cmp.Diff(want, n.devicePools[0].Status.Nodes); diff != "" {
			t.Errorf("status (-want +got):\n%s", diff)
		}
	}
	write(0, before)
	inUse := v1alpha1.Shortage{PF: "0000:3b:00.0", Reason: v1alpha1.ReasonInUse, Message: "PF 0000:3b:00.0 is in use"}
	vfs["made"] = Supply{Generation: 1, PFs: 1, Shortages: []v1alpha1.Shortage{inUse}}
	write(1, []v1alpha1.DevicePoolNodeStatus{{Name: "node1", ObservedGeneration: 1, Shortages: []v1alpha1.Shortage{inUse}}})
	write(0, []v1alpha1.DevicePoolNodeStatus{{Name: "node1", ObservedGeneration: 1, Shortages: []v1alpha1.Shortage{inUse}}})
	vfs["made"] = Supply{Generation: 2, PFs: 1} // the node has such a PF, if no Functions
	write(1, []v1alpha1.DevicePoolNodeStatus{{Name: "node1", ObservedGeneration: 2}})
	vfs["made"] = Supply{Generation: 3, PFs: 1, Shortages: []v1alpha1.Shortage{inUse}} // of what is not read yet
	write(0, []v1alpha1.DevicePoolNodeStatus{{Name: "node1", ObservedGeneration: 2}})
	vfs["made"] = Supply{Generation: 2}
	write(1, []v1alpha1.DevicePoolNodeStatus{})
}

// TestReporterShortages: of VFs and SFs together, one for each PF, and not more than fit.
func TestReporterShortages(t *testing.T) {
	short := func(pf, message string) v1alpha1.Shortage { return v1alpha1.Shortage{PF: pf, Message: message} }
	entry := (&Reporter{Node: "node1"}).entry(
		Pool{Shortages: []v1alpha1.Shortage{short("a", "no SFs"), short("b", "no SFs")}},
		Supply{PFs: 2, Shortages: []v1alpha1.Shortage{short("b", "no VFs"), short("c", "no VFs")}})
	want := []v1alpha1.Shortage{short("a", "no SFs"), short("b", "no VFs; no SFs"), short("c", "no VFs")}
	if diff := cmp.Diff(want, entry.Shortages); diff != "" {
		t.Errorf("-want +got:\n%s", diff)
	}
	var many []v1alpha1.Shortage
	for i := range maxListed + 5 {
		many = append(many, short(fmt.Sprintf("%02d", i), ""))
	}
	if entry := (&Reporter{Node: "node1"}).entry(Pool{}, Supply{Shortages: many}); len(entry.Shortages) != maxListed {
		t.Errorf("%d are listed, want %d", len(entry.Shortages), maxListed)
	}
}
