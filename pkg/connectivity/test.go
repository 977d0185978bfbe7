// SPDX-License-Identifier: Apache-2.0

// Package connectivity tests an installation of xpu-device-plugin by pods that have Functions: how
// long they take to be Ready, whether their interfaces are as asked, whether packets pass within an
// XPUNetwork and none between two, and whether the Functions are free again afterwards. It needs no
// more than the rights of a user who makes pods.
package connectivity

import (
	"context"
	"fmt"
	"io"
	"time"

	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
)

// Options of a test.
type Options struct {
	// Namespace is an existing namespace for the pods. If it is empty, the test makes
	// [DefaultNamespace] and deletes it.
	Namespace string
	// Networks are the XPUNetworks. If there are none, the test takes the first two by name that
	// the pods may join.
	Networks []string
	// Nodes are the nodes that get a pod for each network. If there are none, the test takes all
	// nodes that have Functions in DevicePools.
	Nodes []string
	// Class is the DeviceClass by which pods claim Functions. Resource is the extended resource by
	// which they get them from the device plugin, with Multus. If both are empty, the cluster must
	// offer only one of all.
	Class, Resource string
	// Image is the image of xpu-agent. If it is empty, the test takes the image of the DaemonSet
	// xpu-agent in the namespace Agents.
	Image, Agents string
	// PullSecrets are Secrets of Namespace by which nodes pull the image, for a registry that wants
	// them. Nodes that have the image may ask for them too, from Kubernetes 1.35 on.
	PullSecrets []string
	// Timeout bounds each step.
	Timeout time.Duration
}

// DefaultNamespace is the namespace that a test makes.
const DefaultNamespace = "xpu-test"

// Label marks the objects that a test makes. Its value is the identity of the test.
const Label = v1alpha1.GroupName + "/test"

// Cluster is the cluster under test.
type Cluster struct {
	API client.WithWatch
	// Log returns the log of a pod, which goes on as the pod writes it.
	Log func(ctx context.Context, namespace, pod string) (io.ReadCloser, error)
}

// Check is the result of a step.
type Check struct {
	Name string
	OK   bool
	// Untested is set if it is not OK only because something could not be tested.
	Untested bool
	Took     time.Duration
	// Notes say what is wrong, or what is worth knowing. There are at most mostNotes.
	Notes []string
}

// mostNotes bounds the notes of a check, because a cluster may have thousands of nodes.
const mostNotes = 10

// Test is a test of a cluster. Its methods are for one goroutine.
type Test struct {
	Cluster
	Options
	namespace string
	run       string // identity of the test
	networks  []v1alpha1.XPUNetwork
	leftOut   []string // nodes that have Functions, and none that the pods could get
	failing   string   // a node where a selector of the DeviceClass fails, and why
	pods      []*pod
	orders    int
	made      bool               // there may be something to delete
	failed    map[string]bool    // names of pods
	owners    map[types.UID]bool // pods and claims of the test
	devices   map[device]bool    // that the claims had
}

// String says what the test does.
func (t *Test) String() string {
	var names []string
	for _, n := range t.networks {
		names = append(names, n.Name)
	}
	by := "DeviceClass " + t.Class
	if t.Resource != "" {
		by = "extended resource " + t.Resource
	}
	text := fmt.Sprintf("%s of %s on %s, by %s, in namespace %s", counted(len(t.pods), "pod"),
		listed("network", names), listed("node", t.Nodes), by, t.namespace)
	if len(t.leftOut) > 0 {
		text += "; not tested, because they offer no Function this way: " +
			listed("node", t.leftOut)
	}
	if t.failing != "" {
		text += "; the scheduler places no pod where a selector of the class fails, as on " + t.failing
	}
	return text
}

// Namespace returns the namespace of the test's pods.
func (t *Test) Namespace() string { return t.namespace }

// Failed returns the names of the pods about which a check has failed.
func (t *Test) Failed() []string {
	var names []string
	for _, p := range t.pods {
		if t.failed[p.name] {
			names = append(names, p.name)
		}
	}
	return names
}

// Run makes the pods and checks them. It passes each check to report when it is done, and returns
// whether all hold. An error means that the test could not be carried out. The caller calls
// [Test.Release] whatever Run returns.
func (t *Test) Run(ctx context.Context, report func(Check)) (ok bool, err error) {
	if err := t.makeObjects(ctx); err != nil {
		return false, err
	}

	ctx, cancel := context.WithCancel(ctx)
	defer cancel() // ends the logs
	ok = true
	for _, step := range []func(context.Context) ([]Check, error){
		t.checkReady, t.checkInterfaces, t.checkPackets, t.checkSeparation,
	} {
		checks, err := step(ctx)
		if err != nil {
			return false, err
		}
		for _, c := range checks {
			ok = ok && c.OK
			report(c.bounded())
		}
	}

	return ok, nil
}

// bounded returns the check with at most mostNotes.
func (c Check) bounded() Check {
	if more := len(c.Notes) - mostNotes; more > 0 {
		c.Notes = append(c.Notes[:mostNotes:mostNotes], fmt.Sprintf("and %d more", more))
	}
	return c
}

// podsOf returns the pods of a network that are Ready and have said how their interface is.
func (t *Test) podsOf(network string) (found []*pod) {
	for _, p := range t.pods {
		if p.network == network && p.found != nil {
			found = append(found, p)
		}
	}
	return found
}

// breaks says that the check does not hold.
func (c *Check) breaks() { c.OK, c.Untested = false, false }

// lacks says that something could not be tested.
func (c *Check) lacks(note string) {
	c.OK, c.Untested = false, c.OK || c.Untested
	c.Notes = append(c.Notes, note)
}

// fails notes that something is wrong with a pod.
func (t *Test) fails(c *Check, p *pod, format string, args ...any) {
	c.breaks()
	c.Notes = append(c.Notes, fmt.Sprintf("%s: %s", p, fmt.Sprintf(format, args...)))
	t.failed[p.name] = true
}
