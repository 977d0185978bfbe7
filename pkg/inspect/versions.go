// SPDX-License-Identifier: Apache-2.0

package inspect

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strings"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

// Program is a program of xpu-device-plugin that is deployed in a cluster.
type Program struct {
	Name      string `json:"name"`
	Namespace string `json:"namespace"`
	// Version is the tag of the image, or its digest if it has no tag.
	Version string `json:"version"`
	Image   string `json:"image"`
}

// Versions returns the deployed programs, sorted by name and namespace: in all namespaces, or in
// the given one if the user may not read all.
func Versions(
	ctx context.Context, reader client.Reader, namespace string,
) (programs []Program, err error) {
	for _, in := range []string{metav1.NamespaceAll, namespace} {
		programs, err = versionsIn(ctx, reader, in)
		if !apierrors.IsForbidden(err) {
			break
		}
	}

	slices.SortFunc(programs, func(a, b Program) int {
		return cmp.Or(cmp.Compare(a.Name, b.Name), cmp.Compare(a.Namespace, b.Namespace))
	})
	return programs, err
}

func versionsIn(
	ctx context.Context, reader client.Reader, namespace string,
) (programs []Program, err error) {
	options := []client.ListOption{client.InNamespace(namespace),
		client.MatchingLabels{"app.kubernetes.io/part-of": "xpu-device-plugin"}}
	var sets appsv1.DaemonSetList
	if err := reader.List(ctx, &sets, options...); err != nil {
		return nil, fmt.Errorf("list DaemonSets: %w", err)
	}
	var deployments appsv1.DeploymentList
	if err := reader.List(ctx, &deployments, options...); err != nil {
		return nil, fmt.Errorf("list Deployments: %w", err)
	}

	for _, set := range sets.Items {
		programs = append(programs, programsOf(&set, set.Spec.Template)...)
	}
	for _, d := range deployments.Items {
		programs = append(programs, programsOf(&d, d.Spec.Template)...)
	}
	return programs, nil
}

// programsOf returns the programs of a workload's containers. Init containers have the same images.
func programsOf(workload metav1.Object, template corev1.PodTemplateSpec) (programs []Program) {
	for _, c := range template.Spec.Containers {
		programs = append(programs, Program{Name: c.Name, Namespace: workload.GetNamespace(),
			Version: versionOf(c.Image), Image: c.Image})
	}
	return programs
}

// versionOf returns the tag of an image, or its digest, or "latest", which is what a name without
// both means. A registry may have a port.
func versionOf(image string) string {
	name, digest, _ := strings.Cut(image, "@")
	_, last, found := strings.Cut(name[strings.LastIndex(name, "/")+1:], ":")
	if found {
		return last
	}
	return cmp.Or(digest, "latest")
}
