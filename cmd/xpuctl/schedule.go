// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/discovery"
	typedcorev1 "k8s.io/client-go/kubernetes/typed/core/v1"
	typedresourcev1 "k8s.io/client-go/kubernetes/typed/resource/v1"
	"k8s.io/client-go/rest"

	"github.com/opiproject/xpu-device-plugin/pkg/schedule"
	"github.com/opiproject/xpu-device-plugin/pkg/schedule/bind"
	"github.com/opiproject/xpu-device-plugin/pkg/schedule/report"
	"github.com/opiproject/xpu-device-plugin/pkg/schedule/snapshot"
	"github.com/opiproject/xpu-device-plugin/pkg/terminal"
)

// scheduleOptions are the options of xpuctl schedule.
type scheduleOptions struct {
	cluster           *clusterFlags
	files             []string
	add, remove       []string
	taint, like       []string
	kubernetes, gates string
	output            string
	all, apply        bool
	timeout           time.Duration
}

// scheduleForms are the values of -o.
var scheduleForms = []string{"text", "yaml", "json", "objects"}

func scheduleCommand() *cobra.Command {
	o := &scheduleOptions{cluster: &clusterFlags{}}
	c := &cobra.Command{
		Use:   "schedule [-f FILE|DIRECTORY|-]",
		Short: "Tell where pods would go, which devices they would get, and why some stay pending",
		Long: `Places the pods that have no node yet, one after the other, and tells for each which node and which devices it gets;
or why it stays pending, node by node. Nothing is changed in any cluster.

It asks the allocator of the Kubernetes scheduler, for claims of any DRA driver. This is the allocator of Kubernetes
` + schedule.NewestKubernetes + `, with the features that the version of the scheduler has; faults that older versions had are not reproduced. Beside
claims it looks at nodeSelector, node affinity, taints and requested resources; not at affinity between pods, topology
spread, volumes and host ports. Of nodes that serve a pod equally well, the scheduler takes any, and this command the
first by name. The scheduler does not look at parameters; notes on standard error name those for xpu.opiproject.org with
which a pod would not start.

It reads the cluster of the current kubeconfig, as kubectl does, and puts the objects of the files of -f into it. Files that have
Nodes are a cluster of their own, into which no other one is read, unless --kubeconfig or --context is given. Files have Pods, in the order in which they are to be scheduled; Deployments,
ReplicaSets, StatefulSets, DaemonSets, Jobs, CronJobs, JobSets and MPIJobs, whose pods are made from their templates; Nodes;
ResourceSlices, ResourceClaims, ResourceClaimTemplates, DeviceClasses and DeviceTaintRules of resource.k8s.io. A Node
without status.allocatable has enough CPU and memory for everyone.

With -o objects it prints the pods and their claims in YAML as the scheduler would leave them: pods with node and condition
PodScheduled, claims with allocation and reservedFor. Claims that a template makes are called POD-CLAIM, and UIDs of objects
from files are empty. The output can be read again with --add, to go on from there.

With --apply it does what it says, as a scheduler: pods whose spec.schedulerName is ` + bind.SchedulerName + ` get their claims allocated and reserved,
and are bound to their node once the devices' binding conditions are true. All other pods are left to their scheduler. In a
cluster that is newer than this program it needs --kubernetes, with the version as whose scheduler it is to decide.

Exit codes: 0 if all pods have a node, 1 if some stay pending, 2 for bad input.`,
		Example: `  # Why are pods of this cluster pending?
  xpuctl schedule

  # Would a pod get its device in this cluster?
  xpuctl schedule -f pod.yaml

  # Would a Deployment with three replicas get its devices in another one?
  xpuctl schedule --context prod -f deployment.yaml

  # Everything from files:
  xpuctl schedule -f cluster.yaml -f pods/

  # What if node-3 were gone, or a PF were under maintenance?
  xpuctl schedule --remove node/node-3
  xpuctl schedule --taint driver=xpu.opiproject.org,pool=node-3/0000-3b-00-0/fast:maintenance:NoSchedule

  # Would two more nodes like node-3 help?
  xpuctl schedule --template-node node-3=2

  # Schedule the pods that are left to xpuctl:
  xpuctl schedule --apply

  # With an older scheduler, for a program:
  xpuctl schedule --kubernetes 1.34 -f . -o json`,
		Args: cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error { return o.run(c) },
	}

	f := c.Flags()
	o.cluster.addTo(f)
	f.StringArrayVarP(&o.files, "filename", "f", nil,
		"file or directory with objects, or - for standard input; can be given several times")
	f.StringArrayVar(&o.add, "add", nil, "what if: file with more objects, in place of those "+
		"that have their names; can be given several times")
	f.StringArrayVar(&o.remove, "remove", nil, "what if: object that is gone, KIND/NAME or "+
		"KIND/NAMESPACE/NAME; pods of a node that is gone are placed anew")
	f.StringArrayVar(&o.taint, "taint", nil, "what if: taint, PLACE:KEY[=VALUE]:EFFECT, where "+
		"PLACE is node=NAME, or some of driver=, pool= and device=")
	f.StringArrayVar(&o.like, "template-node", nil, "what if: NODE[=NUMBER] more nodes like this one, as an "+
		"autoscaler would add, with the devices and the pods of DaemonSets of it")
	f.StringVar(&o.kubernetes, "kubernetes", "", "version of the scheduler, "+
		schedule.OldestKubernetes+" to "+schedule.NewestKubernetes+
		"; if empty, the cluster's version, or "+schedule.NewestKubernetes+" with files alone")
	addGatesFlag(f, &o.gates)
	addOutputFlag(c, &o.output, scheduleForms...)
	f.BoolVar(&o.apply, "apply", false, "bind the pods whose spec.schedulerName is "+
		bind.SchedulerName+"; only for what the cluster has, without -f and what if")
	f.DurationVar(&o.timeout, "binding-timeout", bind.DefaultTimeout,
		"how long --apply waits for the binding conditions of a pod's devices")
	f.BoolVar(&o.all, "all", false,
		"in text, tell also why nodes refuse pods that another node takes")

	return c
}

// addGatesFlag adds --feature-gates, for commands that say what the scheduler does.
func addGatesFlag(flags *pflag.FlagSet, gates *string) {
	flags.StringVar(gates, "feature-gates", "", "feature gates of the scheduler that are not as by "+
		"default, for example DRAConsumableCapacity=false")
}

func (o *scheduleOptions) run(c *cobra.Command) error {
	if err := checkOutput(o.output, scheduleForms...); err != nil {
		return err
	}
	if o.timeout <= 0 {
		return fmt.Errorf("--binding-timeout %s: must be longer than 0s", o.timeout)
	}
	if o.apply && len(o.files)+len(o.add)+len(o.remove)+len(o.taint)+len(o.like) > 0 {
		return errors.New("--apply: is for what the cluster has; leave -f, --add, --remove, " +
			"--taint and --template-node out")
	}
	// All that needs no cluster is checked before one is listed, which may take long.
	if _, err := o.features(cmp.Or(o.kubernetes, schedule.NewestKubernetes)); err != nil {
		return err
	}
	if err := snapshot.CheckWhatIf(o.remove, o.taint, o.like); err != nil {
		return err
	}

	from, err := o.snapshot(c)
	if err != nil {
		return err
	}

	features, err := o.features(o.kubernetes)
	if err != nil {
		return err
	}
	for _, note := range []string{features.Note(), features.ListsNote(from.Slices)} {
		if note != "" {
			terminal.Line(c.ErrOrStderr(), "note: %s", note)
		}
	}

	decisions, err := scheduleAll(c.Context(), from, features)
	if err != nil {
		return err
	}

	answer := report.New(features)
	for _, d := range decisions {
		answer.Add(d)
	}

	if err := o.print(c.OutOrStdout(), answer, decisions); err != nil {
		return err
	}

	if o.apply {
		if err := o.bindAll(c, decisions); err != nil {
			return err
		}
	}

	if len(answer.Pending()) > 0 {
		return answerNo(c)
	}

	return nil
}

// features returns the features of the scheduler of a version of Kubernetes.
func (o *scheduleOptions) features(kubernetes string) (schedule.Features, error) {
	features, err := schedule.NewFeatures(kubernetes, o.gates)
	if err == nil && features.Unknown != "" && o.apply {
		err = fmt.Errorf("--apply: Kubernetes %s is newer than this program, which does not know what "+
			"changed; --kubernetes %s binds as the scheduler of that version would", features.Unknown,
			features.Kubernetes)
	}
	return features, err
}

// snapshot reads the objects, applies the what-if flags, and finds out the version of the
// scheduler.
func (o *scheduleOptions) snapshot(c *cobra.Command) (*snapshot.Snapshot, error) {
	reader, err := snapshot.NewReader(c.InOrStdin(), report.GroupVersionKind())
	if err != nil {
		return nil, err
	}

	from, err := reader.Read(o.files...)
	if err != nil {
		return nil, err
	}
	if o.readsCluster(from) {
		if from, err = o.putInto(c.Context(), from); err != nil {
			return nil, err
		}
	}

	if o.kubernetes == "" {
		o.kubernetes = schedule.NewestKubernetes
	}

	for _, reference := range o.remove {
		if err := from.Remove(reference); err != nil {
			return nil, err
		}
	}

	if err := reader.ReadInto(from, o.add...); err != nil {
		return nil, err
	}

	for _, taint := range o.taint {
		if err := from.Taint(taint); err != nil {
			return nil, err
		}
	}

	for _, node := range o.like {
		if err := from.AddLike(node); err != nil {
			return nil, err
		}
	}

	notes, err := from.PlaceDaemonSets()
	if err != nil {
		return nil, err
	}
	for _, note := range notes {
		terminal.Line(c.ErrOrStderr(), "note: %s", note)
	}

	left := reader.Skipped()
	if left != "" && len(from.Pods) == 0 {
		return nil, errors.New("nothing to schedule: " + left)
	}
	if left != "" {
		terminal.Line(c.ErrOrStderr(), "note: %s", left)
	}
	for _, note := range wrongParameters(from) {
		terminal.Line(c.ErrOrStderr(), "note: %s", note)
	}

	return from, nil
}

// readsCluster reports whether the objects of the files are put into the cluster of the kubeconfig.
// Files that have Nodes are a cluster of their own, unless a flag names another one.
func (o *scheduleOptions) readsCluster(files *snapshot.Snapshot) bool {
	if len(o.files) == 0 || o.cluster.isGiven() {
		return true
	}
	return len(files.Nodes) == 0 && o.cluster.isConfigured()
}

// putInto returns the cluster with the objects of the files.
func (o *scheduleOptions) putInto(
	ctx context.Context, files *snapshot.Snapshot,
) (*snapshot.Snapshot, error) {
	all, err := o.list(ctx)
	if err != nil {
		return nil, err
	}
	for _, object := range files.Objects() {
		if err := all.Put(object); err != nil {
			return nil, err
		}
	}
	return all, nil
}

// list reads the cluster.
func (o *scheduleOptions) list(ctx context.Context) (*snapshot.Snapshot, error) {
	config, err := o.cluster.restConfig()
	if err != nil {
		return nil, err
	}

	if o.kubernetes == "" {
		if o.kubernetes, err = clusterVersion(ctx, config); err != nil {
			return nil, err
		}
	}

	clients, err := snapshot.NewClients(config)
	if err != nil {
		return nil, err
	}

	return snapshot.List(ctx, clients)
}

// clusterVersion returns the version of a cluster's API server, such as "v1.37.1".
func clusterVersion(ctx context.Context, config *rest.Config) (string, error) {
	client, err := discovery.NewDiscoveryClientForConfig(config)
	if err != nil {
		return "", err
	}

	version, err := client.ServerVersionWithContext(ctx)
	if err != nil {
		return "", fmt.Errorf("version of the cluster: %w", err)
	}
	return version.GitVersion, nil
}

// bindAll carries out the decisions for pods with xpuctl's scheduler name. It reports to standard
// error, because standard output may be JSON.
func (o *scheduleOptions) bindAll(c *cobra.Command, decisions []*schedule.Decision) error {
	binder, err := o.binder()
	if err != nil {
		return err
	}

	var errs []error
	for _, d := range decisions {
		if d.Node == "" || d.Pod.Spec.SchedulerName != bind.SchedulerName {
			continue
		}

		if err := binder.Bind(c.Context(), d); err != nil {
			errs = append(errs, err)
			continue
		}

		terminal.Line(c.ErrOrStderr(), "pod %s/%s is bound to node %s",
			d.Pod.Namespace, d.Pod.Name, d.Node)
	}

	return errors.Join(errs...)
}

// binder returns what binds pods of the cluster. It speaks protobuf.
func (o *scheduleOptions) binder() (*bind.Binder, error) {
	config, err := o.cluster.restConfig()
	if err != nil {
		return nil, err
	}

	config.ContentType = runtime.ContentTypeProtobuf
	config.AcceptContentTypes = runtime.ContentTypeProtobuf + "," + runtime.ContentTypeJSON
	core, err := typedcorev1.NewForConfig(config)
	if err != nil {
		return nil, err
	}

	resource, err := typedresourcev1.NewForConfig(config)
	if err != nil {
		return nil, err
	}

	return &bind.Binder{Pods: core, Claims: resource, Timeout: o.timeout}, nil
}

// scheduleAll schedules the pods without a node.
func scheduleAll(
	ctx context.Context, from *snapshot.Snapshot, features schedule.Features,
) ([]*schedule.Decision, error) {
	scheduler := schedule.New(ctx, from, features)
	var decisions []*schedule.Decision
	for _, pod := range from.Pods {
		if pod.Spec.NodeName != "" || pod.DeletionTimestamp != nil {
			continue
		}
		decision, err := scheduler.Schedule(ctx, pod)
		if err != nil {
			return nil, err
		}
		decisions = append(decisions, decision)
	}

	return decisions, nil
}

func (o *scheduleOptions) print(
	to io.Writer, answer *report.Schedule, decisions []*schedule.Decision,
) error {
	switch o.output {
	case "text":
		return answer.Text(to, o.all)
	case "objects":
		return printObjects(to, report.Objects(decisions), "yaml")
	}
	return printValue(to, o.output, answer)
}
